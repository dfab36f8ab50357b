"""Search the plans of a layer's matmuls by the time of the whole layer.

A matmul that is fast alone may be slow in a layer, where it starts while the programs of the previous one still run. So
a plan is evaluated by the layer's time with the other matmuls unchanged: coordinate descent, in two passes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.tune.layers import LayerPlans
from benchmarks.tune.shapes import Key, LayerKey
from benchmarks.tune.timings import Timings
from tandem.engine_core.kernels.tiles.plan_types import Plan, W8A8GemmPlan

TURNS = 2
FEW = 4
"""Plans of a matmul that are tried in the second pass."""
MARGIN = 0.005
"""Minimum relative gain of a plan; less is noise."""
ROUNDS = 3
"""Times that a faster layer and the previous one are timed again, alternating."""


class Round(NamedTuple):
    """Key of a layer's time in the timings file."""

    layer: LayerKey
    number: int
    """0 for the first timing, then the number of the alternation."""


class OutOfTimeError(Exception):
    """Raised when the time limit has passed."""


@dataclass(frozen=True)
class LayerTask:
    """One layer to tune."""

    key: LayerKey
    candidates: Mapping[Key, Sequence[Plan | W8A8GemmPlan]]
    """Plans of each matmul, the longest matmul first. The first plan is the rule's."""
    today: LayerPlans


class LayerTimes:
    """Times of one layer, saved or measured."""

    def __init__(
        self,
        layer: LayerKey,
        timings: Timings,
        measure: Callable[[LayerKey, LayerPlans], float],
        out_of_time: Callable[[], bool],
    ) -> None:
        """Initialize; measure returns the microseconds of a layer using given plans."""
        self.layer = layer
        self.timings = timings
        self.measure = measure
        self.out_of_time = out_of_time

    def __call__(self, plans: LayerPlans, number: int = 0) -> float:
        """Return the time of a round.

        Raises OutOfTimeError if it would have to be measured after the time limit, and RuntimeError for plans that
        break the CUDA context, which are recorded as unusable.
        """
        name, plan_values = Round(self.layer, number), tuple(plans.values())
        kept = self.timings.of(name, plan_values)
        if kept is not None:
            return kept
        if self.out_of_time():
            raise OutOfTimeError
        try:
            us = self.measure(self.layer, plans)
        except RuntimeError:
            self.timings.add(name, plan_values, float("inf"))
            raise
        self.timings.add(name, plan_values, us)
        return us


class Descent:
    """Search of one layer's plans.

    Starts from the rule's plans, so that a resumed run takes the same path.
    """

    def __init__(
        self,
        task: LayerTask,
        fixed: LayerPlans,
        time: Callable[[LayerPlans, int], float],
        usable: Callable[[Key, Plan | W8A8GemmPlan], bool],
    ) -> None:
        """Initialize the search.

        fixed: plans of matmuls shared with an earlier layer of this run; usable: whether a plan was compiled. Others
        are left for a later run.
        """
        self.task = task
        self.time = time
        self.usable = usable
        self.fixed = fixed
        self.plans: dict[Key, Plan | W8A8GemmPlan] = {
            key: fixed.get(key, listed[0]) for key, listed in task.candidates.items()
        }
        """Best plans so far."""

    @property
    def today(self) -> LayerPlans:
        """Current plans of the engine, except the fixed ones."""
        return {key: self.fixed.get(key, plan) for key, plan in self.task.today.items()}

    def run(self) -> bool:
        """Search; return whether it completed in time."""
        complete, start = True, dict(self.plans)
        try:
            self._descend()
        except OutOfTimeError:
            complete = False
        if self.today not in (start, self.plans):
            try:
                # The report uses its first time.
                self.time(self.today, 0)
                better = self._surely_faster(self.plans, self.today)
            except OutOfTimeError:
                better, complete = False, False
            self.plans = self.plans if better else dict(self.today)
        return complete

    def _descend(self) -> None:
        us = self.time(self.plans, 0)
        listed = {key: plans for key, plans in self.task.candidates.items() if key not in self.fixed}
        for _ in range(TURNS):
            before = dict(self.plans)
            for key, plans in listed.items():
                timed = self._timed(key, plans)
                listed[key] = [plan for _, _, plan in timed[:FEW]]
                best_us, _, best = timed[0]
                other = {**self.plans, key: best}
                if best_us < us * (1 - MARGIN) and self._surely_faster(other, self.plans):
                    self.plans, us = other, best_us
            if self.plans == before:
                return

    def _timed(self, key: Key, plans: Sequence[Plan | W8A8GemmPlan]) -> list[tuple[float, int, Plan | W8A8GemmPlan]]:
        """Return the layer's time with each plan of a matmul, the fastest first."""
        now = self.plans[key]
        tried = [plan for plan in plans if plan == now or self.usable(key, plan)]
        if now not in tried:
            tried.append(now)
        return sorted((self.time({**self.plans, key: plan}, 0), index, plan) for index, plan in enumerate(tried))

    def _surely_faster(self, plans: LayerPlans, others: LayerPlans) -> bool:
        """Return whether plans are faster than the current ones in every round."""
        rounds = [(self.time(plans, number), self.time(others, number)) for number in range(1, ROUNDS + 1)]
        return max(us for us, _ in rounds) < min(us for _, us in rounds)


@dataclass(frozen=True)
class Found:
    """Plans found for one layer."""

    task: LayerTask
    plans: LayerPlans
    complete: bool
    """Whether the search completed in time."""


def search(
    tasks: Iterable[LayerTask],
    timings: Timings,
    measure: Callable[[LayerKey, LayerPlans], float],
    usable: Callable[[LayerTask, Key, Plan | W8A8GemmPlan], bool],
    out_of_time: Callable[[], bool],
) -> list[Found]:
    """Search the plans of several layers in order.

    A matmul that several layers share keeps the plan found in the first. measure, out_of_time: see `LayerTimes`;
    usable: whether a plan of a matmul was compiled.
    """
    fixed: dict[Key, Plan | W8A8GemmPlan] = {}
    found = []
    for task in tasks:
        times = LayerTimes(task.key, timings, measure, out_of_time)
        descent = Descent(task, dict(fixed), times, lambda key, plan, task=task: usable(task, key, plan))
        complete = descent.run()
        found.append(Found(task, descent.plans, complete))
        fixed |= descent.plans
    return found


def incomplete(tasks: Sequence[LayerTask], timings: Timings) -> list[LayerTask]:
    """Return the layers with missing times."""

    def measure(_layer: LayerKey, _plans: LayerPlans) -> float:
        raise OutOfTimeError

    searched = search(tasks, timings, measure, lambda *_: True, lambda: True)
    return [found.task for found in searched if not found.complete]
