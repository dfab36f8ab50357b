"""Every kernel compiles for every architecture, fits in shared memory, and uses PDL only if supported."""

import ast
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gpus import SHARED_MEMORY
from tests.test_architecture import MODULES

ROOT = Path(__file__).parents[3]
FAST = {"TRITON_DISABLE_LINE_INFO": "1", "DISABLE_PTXAS_OPT": "1"}
"""Settings of Triton that halve the time without a change to shared memory or instructions."""
Lines = list[dict[str, Any]]


def compiled(*arguments: str, **settings: str) -> Lines:
    """Output of a separate process, since Triton's interpreter may be enabled in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_kernels", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def all_tiles(architecture: int) -> Lines:
    """Output of one process per core for its part of the launches."""
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count) as pool:
        shares = [
            pool.submit(compiled, "--all-tiles", f"--share={part}/{count}", str(architecture), **FAST)
            for part in range(1, count + 1)
        ]
        return [line for share in shares for line in share.result()]


def launched_kernels() -> set[str]:
    """List the kernels launched by any module, by the `name[grid](...)` of their launches."""
    found = set()
    for name, path in MODULES.items():
        if name.startswith("tandem.engine_core.kernels."):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    found.add(ast.unparse(node.func.value))
    return {name for name in found if name.endswith("_kernel")}


def check(lines: Lines, architecture: int) -> None:
    own = [line for line in lines if line["architecture"] == architecture]
    assert {line["kernel"] for line in own} == launched_kernels()
    limit = SHARED_MEMORY[architecture] * 1024
    assert [line for line in own if line["shared_memory"] > limit] == []
    chained = {line["kernel"] for line in own if line["chained"]}
    unchained = {"_tile_kernel", "_merge_kernel", "_update_tables_kernel"}
    assert chained == (launched_kernels() - unchained if architecture >= 90 else set())
    assert all(line["code_bytes"] > 1000 for line in own)
    if architecture >= 90:
        check_early_copies([line for line in own if line["early"] is not None])
        check_next_start([line for line in own if line["chained"]])


def check_early_copies(lines: Lines) -> None:
    """The pipeline's prologue of blocks, keys and values each, is loaded before the wait in the loop.

    `paged_decode` relies on their number: it waits first if one more would reach the newest position.
    """
    assert {line["early"] for line in lines} == {False, True}
    for line in lines:
        ahead = 2 * (line["stages"] - 1) if line["early"] else 0
        assert line["copies_before_wait"] == ahead, line


def check_next_start(lines: Lines) -> None:
    """A kernel lets the next one start before it ends, unless it is launched to delay it."""
    assert {line["delays_next"] for line in lines} == {None, False, True}
    assert {line["early"] for line in lines if line["delays_next"]} == {False, True}, "true as Llama 3.1 8B at 64 rows"
    assert all(line["starts_next"] is not bool(line["delays_next"]) for line in lines)


@pytest.fixture(scope="module")
def one_tile_each() -> Lines:
    """The most different architectures.

    120 has PDL and the least shared memory, 89 is the first with FP8 matmuls, 80 has neither.
    """
    return compiled("80", "89", "120", **FAST)


@pytest.mark.parametrize("architecture", [80, 89, 120])
def test_one_tile_of_each_kernel_fits_the_architecture(one_tile_each: Lines, architecture: int) -> None:
    check(one_tile_each, architecture)


def test_gemv_weights_are_dequantized_within_their_threads(one_tile_each: Lines) -> None:
    """Only a step's inputs pass through shared memory, two bytes each, or four if permuted."""
    lines = [line for line in one_tile_each if line["kernel"] == "quantized_gemv_kernel"]
    assert {line["ordered"] for line in lines} == {False, True}
    for line in lines:
        assert line["shared_memory"] <= line["inputs"] * (4 if line["ordered"] else 2), line


def test_chunks_of_recurrent_layers_do_not_use_wgmma() -> None:
    """Triton generates invalid reads of shared memory for several wgmma of 64 rows."""
    lines = compiled("--recurrent", "90", **FAST)
    assert {"_piece_matrices_kernel", "_row_states_kernel"} <= {line["kernel"] for line in lines}
    assert [line["kernel"] for line in lines if line["wgmma"]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_all_tiles_fit_the_architecture(architecture: int) -> None:
    check(all_tiles(architecture), architecture)
