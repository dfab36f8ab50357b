"""Search for the plans of a layer's products, in the time of the whole layer.

Products that are fast alone may be slow in a layer, where each begins while the one before it ends, and finds its
programs still there. So a plan is judged by the layer's time with the other products as they are. The products are gone
through twice, the second time with the best plans of the first.
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
"""Plans of a product that are tried again the second time."""
MARGIN = 0.005
"""Share of a layer's time that a plan has to save: less is noise."""
ROUNDS = 3
"""How often a faster layer and the one before it are timed again, in turns."""


class Round(NamedTuple):
    """Name of a layer's time in the file of times."""

    layer: LayerKey
    number: int
    """0 of the first time, then counted in turns."""


class OutOfTimeError(Exception):
    """The time to measure is over."""


@dataclass(frozen=True)
class LayerTask:
    """One layer to tune."""

    key: LayerKey
    candidates: Mapping[Key, Sequence[Plan | W8A8GemmPlan]]
    """The plans to try of each product, the longest product first. The first is the rule's."""
    today: LayerPlans


class LayerTimes:
    """The times of one layer, kept ones or measured ones."""

    def __init__(
        self, layer: LayerKey, timings: Timings, measure: Callable[[LayerKey, LayerPlans], float],
        out_of_time: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Time a layer.

        measure: returns the microseconds of a layer by its plans.
        """
        self.layer = layer
        self.timings = timings
        self.measure = measure
        self.out_of_time = out_of_time

    def __call__(self, plans: LayerPlans, number: int = 0) -> float:
        """Return the time of a round.

        Raises OutOfTimeError where it would have to be measured, and RuntimeError for plans that break the device,
        which count as some that cannot run.
        """
        name, plans_by_place = Round(self.layer, number), tuple(plans.values())
        kept = self.timings.of(name, plans_by_place)
        if kept is not None:
            return kept
        if self.out_of_time():
            raise OutOfTimeError
        try:
            us = self.measure(self.layer, plans)
        except RuntimeError:
            self.timings.add(name, plans_by_place, float("inf"))
            raise
        self.timings.add(name, plans_by_place, us)
        return us


class Descent:
    """Search for the plans of a layer.

    It starts from the rule's plans, so that a run which goes on from another's times takes the same way.
    """

    def __init__(
        self, task: LayerTask, settled: LayerPlans, time: Callable[[LayerPlans, int], float],
        usable: Callable[[Key, Plan | W8A8GemmPlan], bool],
    ) -> None:  # fmt: skip
        """Search for one layer.

        settled: plans of products that an earlier layer of this run has too, which stay; usable: whether a plan was
        compiled. Others are left for a later run.
        """
        self.task = task
        self.time = time
        self.usable = usable
        self.settled = settled
        self.plans: dict[Key, Plan | W8A8GemmPlan] = {
            key: settled.get(key, listed[0]) for key, listed in task.candidates.items()
        }
        """The best that were found so far."""

    @property
    def today(self) -> LayerPlans:
        """Today's plans, but for those that are settled."""
        return {key: self.settled.get(key, plan) for key, plan in self.task.today.items()}

    def run(self) -> bool:
        """Search, and return whether there was time for all of it."""
        complete, start = True, dict(self.plans)
        try:
            self._descend()
        except OutOfTimeError:
            complete = False
        if self.today not in (start, self.plans):
            try:
                # Its first time is what is told of it.
                self.time(self.today, 0)
                better = self._surely_faster(self.plans, self.today)
            except OutOfTimeError:
                better, complete = False, False
            self.plans = self.plans if better else dict(self.today)
        return complete

    def _descend(self) -> None:
        us = self.time(self.plans, 0)
        listed = {key: plans for key, plans in self.task.candidates.items() if key not in self.settled}
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

    def _timed(
        self, key: Key, plans: Sequence[Plan | W8A8GemmPlan]
    ) -> list[tuple[float, int, Plan | W8A8GemmPlan]]:  # fmt: skip
        """Return the layer's time with each plan of a product, the fastest first."""
        now = self.plans[key]
        tried = [plan for plan in plans if plan == now or self.usable(key, plan)]
        if now not in tried:
            tried.append(now)
        return sorted((self.time({**self.plans, key: plan}, 0), place, plan) for place, plan in enumerate(tried))

    def _surely_faster(self, plans: LayerPlans, others: LayerPlans) -> bool:
        """Return whether plans are faster than others in every round."""
        rounds = [
            (self.time(plans, number), self.time(others, number)) for number in range(1, ROUNDS + 1)
        ]  # fmt: skip
        return max(us for us, _ in rounds) < min(us for _, us in rounds)


@dataclass(frozen=True)
class Found:
    """The plans that were found for one layer."""

    task: LayerTask
    plans: LayerPlans
    complete: bool
    """Whether there was time for the whole search."""


def search(
    tasks: Iterable[LayerTask],
    timings: Timings,
    measure: Callable[[LayerKey, LayerPlans], float],
    usable: Callable[[LayerTask, Key, Plan | W8A8GemmPlan], bool],
    out_of_time: Callable[[], bool],
) -> list[Found]:
    """Search for the plans of layers, one after the other.

    A product that several of them have keeps the plan that the first one found. measure, out_of_time: as in
    `LayerTimes`; usable: whether a plan of a product was compiled.
    """
    settled: dict[Key, Plan | W8A8GemmPlan] = {}
    found = []
    for task in tasks:
        times = LayerTimes(task.key, timings, measure, out_of_time)
        descent = Descent(task, dict(settled), times, lambda key, plan, task=task: usable(task, key, plan))
        complete = descent.run()
        found.append(Found(task, descent.plans, complete))
        settled |= descent.plans
    return found


def incomplete(tasks: Sequence[LayerTask], timings: Timings) -> list[LayerTask]:
    """Return the layers for whose search times are missing."""

    def measure(_layer: LayerKey, _plans: LayerPlans) -> float:
        raise OutOfTimeError

    searched = search(tasks, timings, measure, lambda *_: True, lambda: True)
    return [found.task for found in searched if not found.complete]
