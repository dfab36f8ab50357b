"""Times of plans, and the plans that they choose.

Times are kept in a file as they are measured.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Plan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import DecodeKey, ProductKey, TileTable, W8A8GemmKey

Key: TypeAlias = ProductKey | DecodeKey | W8A8GemmKey
AnyPlan: TypeAlias = Plan | DecodePlan | W8A8GemmPlan
MARGIN = 0.02
"""Share of today's time that another plan has to save: less is noise."""


@dataclass(frozen=True)
class Task:
    """One kind of decode attention to tune."""

    key: DecodeKey
    plans: Sequence[DecodePlan]
    """The plans to time; the first is today's."""
    rule: DecodePlan
    """The plan that is taken without a table."""


@dataclass
class Timings:
    """Microseconds of plans, also those that an earlier run measured."""

    path: Path
    """File of one JSON object a line."""
    found: dict[tuple[str, str], float] = field(default_factory=dict)
    """Microseconds by what was timed and its plans, as text; infinite for plans that cannot run."""

    @classmethod
    def resume(cls, path: Path) -> "Timings":
        """Read what an earlier run measured; a last line that was cut off is left out."""
        timings = cls(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                timings.found[entry["key"], entry["plan"]] = float(entry["us"])
            except (ValueError, KeyError, TypeError):
                continue
        return timings

    def add(self, key: object, plan: object, us: float) -> None:
        """Keep a time, in the file too."""
        self.found[repr(key), repr(plan)] = us
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": repr(key), "plan": repr(plan), "us": us}) + "\n")

    def of(self, key: object, plan: object) -> float | None:
        """Return the time of a plan, None if it was not measured."""
        return self.found.get((repr(key), repr(plan)))


@dataclass(frozen=True)
class Choice:
    """The best plan of one task."""

    task: Task
    plan: DecodePlan
    us: float
    today_us: float
    rule_us: float | None


def measure(
    tasks: Iterable[Task],
    time_plan: Callable[[DecodeKey, DecodePlan], float],
    timings: Timings,
    usable: Callable[[Key, AnyPlan], bool],
    out_of_time: Callable[[], bool],
) -> bool:
    """Time all plans that were not timed before.

    Return whether there was time for all of them. usable: whether a plan was compiled; others are left for a later run.
    Today's plan is timed in any case. Raises RuntimeError for a plan that breaks the device, which counts as one that
    cannot run.
    """
    for task in tasks:
        for number, plan in enumerate(task.plans):
            if timings.of(task.key, plan) is not None or not (number == 0 or usable(task.key, plan)):
                continue
            if out_of_time():
                return False
            try:
                us = time_plan(task.key, plan)
            except RuntimeError:
                # The device is lost; the next run does without this plan.
                timings.add(task.key, plan, float("inf"))
                raise
            timings.add(task.key, plan, us)
    return True


def choose_best(tasks: Iterable[Task], timings: Timings) -> list[Choice]:
    """Return the fastest plan of each task for which today's was timed.

    Another than today's has to save `MARGIN`.
    """
    choices = []
    for task in tasks:
        today = timings.of(task.key, task.plans[0])
        if today is None:
            continue
        timed = [
            (us, number) for number, plan in enumerate(task.plans) if (us := timings.of(task.key, plan)) is not None
        ]
        us, number = min(timed)
        if us > today * (1 - MARGIN):
            us, number = today, 0
        if us < float("inf"):
            choices.append(Choice(task, task.plans[number], us, today, timings.of(task.key, task.rule)))
    return choices


def merged(
    table: TileTable, device: str, plans: Mapping[Key, AnyPlan], rules: Mapping[Key, AnyPlan]
) -> TileTable:  # fmt: skip
    """Return a table with plans that were chosen.

    It keeps what this run did not measure. A plan that the rule takes anyway has no entry.
    """
    lists: dict[type, dict] = {  # type: ignore[type-arg]
        ProductKey: dict(table.products), DecodeKey: dict(table.decode), W8A8GemmKey: dict(table.byte_products),
    }  # fmt: skip
    for key, plan in plans.items():
        entries = lists[type(key)]
        entries.pop(key, None)
        if plan != rules[key]:
            entries[key] = plan
    return TileTable(device, lists[ProductKey], lists[DecodeKey], lists[W8A8GemmKey])
