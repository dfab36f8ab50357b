"""The folders as rooms of a house: which may import which, and how large each may grow."""

from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from tests.test_architecture import MODULES, ROOT, SOURCES, imported

MAX_MODULES = 16
"""Modules that one folder may hold directly, beside its `__init__.py`."""

LEVELS = {
    "frontend": (
        {
            "errors",
            "access",
            "die_with_parent",
            "listening",
            "metrics",
            "process",
            "progress",
            "run_directory",
            "workers",
        },
        {"request", "engine", "store", "hub", "control_channel", "special_tokens"},
        {"config", "grammar"},
        {"flags"},
        {"generation", "supervisor"},
        {"chat"},
        {"api"},
        {"server"},
        {"cli", "offline"},
        {"__main__"},
    ),
    "engine_core": (
        {"errors", "integers"},
        {"graph_sizes", "kernels", "plan", "quantization", "rope_config"},
        {"attention", "config", "contracts", "loader", "pipeline", "sampling"},
        {"model_config"},
        {"constraints", "layers", "sequence", "wire"},
        {"kv_cache", "stats"},
        {"models", "scheduler"},
        {"key_limits", "runtime"},
        {"control"},
        {"engine"},
        {"startup"},
        {"__main__"},
    ),
}
"""Rooms (the folders and the loose modules of a package), from the ground up. One imports only from lower levels."""
MAX_ROOMS = {"frontend": 27, "engine_core": 28}
MAX_ARROWS = {"frontend": 96}
"""Pairs of rooms of which the first imports the second."""

Arrows = dict[tuple[str, str], set[str]]


def arrows(folder: str) -> Arrows:
    """Collect the imports between the children of a package, with the pairs of modules that make each of them."""
    found: Arrows = defaultdict(set)
    depth = folder.count(".") + 1
    for module, path in MODULES.items():
        if not module.startswith(folder + "."):
            continue
        room = module.split(".")[depth]
        for name in imported(path):
            if name.startswith(folder + "."):
                other = name.split(".")[depth]
                if other != room:
                    found[room, other].add(f"{module} imports {name}")
    return found


def rooms(package: str) -> set[str]:
    """List the children of a package that hold code."""
    prefix = f"tandem.{package}."
    return {name.removeprefix(prefix).split(".")[0] for name in MODULES if name.startswith(prefix)}


@pytest.mark.parametrize("package", LEVELS)
def test_every_room_stands_on_one_level(package: str) -> None:
    placed = [room for level in LEVELS[package] for room in level]
    assert len(placed) == len(set(placed))
    assert set(placed) == rooms(package)


@pytest.mark.parametrize("package", LEVELS)
def test_rooms_import_only_from_lower_levels(package: str) -> None:
    height = {room: number for number, level in enumerate(LEVELS[package]) for room in level}
    wrong = [
        line for (room, other), lines in arrows(f"tandem.{package}").items() if height[other] >= height[room]
        for line in sorted(lines)
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("package", LEVELS)
def test_a_package_stays_easy_to_draw(package: str) -> None:
    assert len(rooms(package)) <= MAX_ROOMS[package]
    drawn = sorted(arrows(f"tandem.{package}"))
    assert len(drawn) <= MAX_ARROWS.get(package, len(drawn)), drawn


def packages() -> list[str]:
    """List every folder of the product, as packages."""
    return sorted({name.rpartition(".")[0] for name in MODULES if name.count(".") > 1})


@pytest.mark.parametrize("folder", packages())
def test_siblings_do_not_import_one_another_in_a_circle(folder: str) -> None:
    drawn = arrows(folder)
    below: dict[str, set[str]] = defaultdict(set)
    for room, other in drawn:
        below[room].add(other)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail("\n".join(f"{pair}: {sorted(drawn[pair])}" for pair in pairwise(reversed(circle))))


def test_folders_stay_small() -> None:
    """Check the folders of the product and of the benchmarks."""
    modules = [path.relative_to(ROOT) for path in SOURCES if path.name != "__init__.py"]
    sizes = Counter(str(path.parent) for path in modules if path.parts[0] != "tests")
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}
