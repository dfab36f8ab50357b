"""Plan of a campaign: which measurements it has, with what server, for how long."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

PLANS = Path(__file__).parent
"""Folder of the plans, a file each GPU."""

Name = Annotated[str, Meta(pattern="^[a-z0-9_]+$")]
Seconds = Annotated[int, Meta(gt=0)]


class Measurement(Struct, frozen=True, forbid_unknown_fields=True):
    """One command."""

    name: Name
    """Its name, by which it is asked for; that of its result in `benchmarks/results` if it has one."""
    seconds: Seconds
    """Time that it takes on the machine it was planned for. It is stopped after twice that."""
    command: str
    """Module and its arguments, with `Group.places` in braces."""

    def arguments(self, places: dict[str, str]) -> list[str]:
        """Return the command's words. Raises KeyError for a place that is not given."""
        return [word.format_map({**places, "name": self.name}) for word in shlex.split(self.command)]


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements in a row, beside one server or none."""

    name: Name
    measurement: Annotated[list[Measurement], Meta(min_length=1)]
    shape: str = ""
    """Shape in `benchmarks/shapes` of which a model folder is made; empty for none."""
    tokenizer: Literal["made-up", "default-model"] = "made-up"
    """Tokenizer of that folder: one for the shape's vocabulary, or the default model's with its 4,096 ids."""
    serve: bool = True
    """False if the commands start what they need of that folder themselves."""
    flags: str = ""
    """Flags of `tandem serve`."""
    start_seconds: int = 0
    """Time that the server needs until it is ready, with a cold Triton cache."""

    @property
    def seconds(self) -> int:
        """Time that it takes in all, with the start of its server."""
        return self.start_seconds + sum(one.seconds for one in self.measurement)

    @property
    def places(self) -> tuple[str, ...]:
        """Names that its commands may use in braces."""
        if not self.shape:
            return ("name", "out")
        folder = ("name", "out", "folder", "model")
        return (*folder, "url", "metrics") if self.serve else folder


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """Groups in the order in which they run."""

    group: Annotated[list[Group], Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [group.name for group in self.group] + [one.name for group in self.group for one in group.measurement]
        if len(set(names)) < len(names):
            raise ValueError(f"names are there twice: {sorted({name for name in names if names.count(name) > 1})}")
        for group in self.group:
            for one in group.measurement:
                try:
                    one.arguments(dict.fromkeys(group.places, ""))
                except (KeyError, ValueError) as error:
                    raise ValueError(
                        f"{one.name}: {error} in its command; known are {', '.join(group.places)}"
                    ) from None


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises msgspec.ValidationError or OSError."""
    return msgspec.toml.decode(path.read_bytes(), type=Plan)


def choose(plan: Plan, names: list[str], done: set[str]) -> Iterator[Group]:
    """Return the groups with what is asked for and was not done.

    names: of groups or measurements; all if empty. Raises ValueError for one that the plan does not have.
    """
    known = {group.name for group in plan.group} | {one.name for group in plan.group for one in group.measurement}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"--only {' '.join(unknown)}: the plan has {', '.join(sorted(known))}")
    for group in plan.group:
        wanted = not names or group.name in names
        left = [one for one in group.measurement if (wanted or one.name in names) and one.name not in done]
        if left:
            yield msgspec.structs.replace(group, measurement=left)
