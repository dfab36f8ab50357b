"""Times of plans, saved as they are measured, and the choice of the best."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Plan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import DecodeKey, MatmulKey, TileTable, W8A8GemmKey

Key: TypeAlias = MatmulKey | DecodeKey | W8A8GemmKey
AnyPlan: TypeAlias = Plan | DecodePlan | W8A8GemmPlan
MARGIN = 0.02
"""Minimum relative gain over the current plan; less is noise."""


@dataclass(frozen=True)
class Task:
    """One shape of decode attention to tune."""

    key: DecodeKey
    plans: Sequence[DecodePlan]
    """Plans to time; the first is the current one."""
    rule: DecodePlan
    """Plan chosen without a table."""


@dataclass
class Timings:
    """Microseconds of plans, including those of earlier runs."""

    path: Path
    """JSON Lines file."""
    found: dict[tuple[str, str], float] = field(default_factory=dict)
    """Microseconds by the repr of key and plan; infinite for plans that cannot run."""

    @classmethod
    def resume(cls, path: Path) -> "Timings":
        """Read the times of earlier runs, skipping incomplete lines."""
        timings = cls(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                timings.found[entry["key"], entry["plan"]] = float(entry["us"])
            except (ValueError, KeyError, TypeError):
                continue
        return timings

    def add(self, key: object, plan: object, us: float) -> None:
        """Record a time, also in the file."""
        self.found[repr(key), repr(plan)] = us
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": repr(key), "plan": repr(plan), "us": us}) + "\n")

    def of(self, key: object, plan: object) -> float | None:
        """Return the time of a plan, None if not measured."""
        return self.found.get((repr(key), repr(plan)))


@dataclass(frozen=True)
class Choice:
    """Best plan of one task."""

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
    """Time all plans that were not timed before; return whether all were timed in time.

    usable: whether a plan was compiled; others are left for a later run, except the current plan. Raises RuntimeError
    for a plan that breaks the CUDA context, which is recorded as unusable.
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
                # The CUDA context is lost; the next run skips this plan.
                timings.add(task.key, plan, float("inf"))
                raise
            timings.add(task.key, plan, us)
    return True


def choose_best(tasks: Iterable[Task], timings: Timings) -> list[Choice]:
    """Return the fastest plan of each task with a timed current plan.

    A plan other than the current one has to gain `MARGIN`.
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


def merged(table: TileTable, device: str, plans: Mapping[Key, AnyPlan], rules: Mapping[Key, AnyPlan]) -> TileTable:
    """Return a table updated with the chosen plans.

    Entries that this run did not measure stay. Plans equal to the rule's get no entry.
    """
    lists: dict[type, dict] = {  # type: ignore[type-arg]
        MatmulKey: dict(table.products),
        DecodeKey: dict(table.decode),
        W8A8GemmKey: dict(table.byte_products),
    }
    for key, plan in plans.items():
        entries = lists[type(key)]
        entries.pop(key, None)
        if plan != rules[key]:
            entries[key] = plan
    products, decode, byte_products = lists[MatmulKey], lists[DecodeKey], lists[W8A8GemmKey]
    return replace(table, device=device, products=products, decode=decode, byte_products=byte_products)
