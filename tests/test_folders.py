"""Import order of the children of each package, without cycles."""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from tests.test_architecture import MODULES, imported

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
        {"generation"},
        {"chat"},
        {"supervisor"},
        {"api"},
        {"server"},
        {"cli", "offline"},
        {"__main__"},
    ),
    "engine_core": (
        {"adapter", "errors", "integers", "weight_version"},
        {"graph_sizes", "kernels", "page_counts", "plan", "quantization", "rope_config"},
        {"attention", "config", "contracts", "loader", "memory", "pipeline", "sampling"},
        {"model_config"},
        {"constraints", "layers", "sequence", "wire"},
        {"kv_cache", "lora", "stats"},
        {"models", "scheduler"},
        {"key_limits", "runtime", "weight_swaps", "weight_updates"},
        {"control"},
        {"engine"},
        {"startup"},
        {"__main__"},
    ),
}
"""Folders and loose modules of a package, lowest level first. Each imports from lower levels only."""

Imports = dict[tuple[str, str], set[str]]


def imports_between(folder: str) -> Imports:
    """Collect the imports between the children of a package, with the pairs of modules that make each of them."""
    found: Imports = defaultdict(set)
    depth = folder.count(".") + 1
    for module, path in MODULES.items():
        if not module.startswith(folder + "."):
            continue
        child = module.split(".")[depth]
        for name in imported(path):
            if name.startswith(folder + "."):
                other = name.split(".")[depth]
                if other != child:
                    found[child, other].add(f"{module} imports {name}")
    return found


def children(package: str) -> set[str]:
    """List the children of a package that hold code."""
    prefix = f"tandem.{package}."
    return {name.removeprefix(prefix).split(".")[0] for name in MODULES if name.startswith(prefix)}


@pytest.mark.parametrize("package", LEVELS)
def test_every_child_has_one_level(package: str) -> None:
    listed = [child for level in LEVELS[package] for child in level]
    assert len(listed) == len(set(listed))
    assert set(listed) == children(package)


@pytest.mark.parametrize("package", LEVELS)
def test_children_import_only_from_lower_levels(package: str) -> None:
    height = {child: number for number, level in enumerate(LEVELS[package]) for child in level}
    wrong = [
        line for (child, other), lines in imports_between(f"tandem.{package}").items() if height[other] >= height[child]
        for line in sorted(lines)
    ]  # fmt: skip
    assert wrong == []


def packages() -> list[str]:
    """List every folder of the product, as packages."""
    return sorted({name.rpartition(".")[0] for name in MODULES if name.count(".") > 1})


@pytest.mark.parametrize("folder", packages())
def test_siblings_have_no_import_cycles(folder: str) -> None:
    edges = imports_between(folder)
    below: dict[str, set[str]] = defaultdict(set)
    for child, other in edges:
        below[child].add(other)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        cycle = error.args[1]
        pytest.fail("\n".join(f"{pair}: {sorted(edges[pair])}" for pair in pairwise(reversed(cycle))))
