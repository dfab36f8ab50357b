"""The choice of FlashInfer or Triton for the attention of prompts."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.triton import RaggedGraphPlanner
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.runtime.device import CpuDevice
from tandem.engine_core.startup.attention import (
    MAX_PAGE_TABLE_ENTRIES,
    GraphPlanners,
    can_plan_directly,
    describe_kernel,
    find_obstacle,
    further_graph_bytes,
)
from tests.fakes.flashinfer_library import load_over_double
from tests.fakes.gpus import H200
from tests.support.refusals import numbers_in

PLAIN, LOCAL = LayerAttention(0.125), LayerAttention(0.125, window=1024)
CAPPED = LayerAttention(0.125, softcap=50.0)
BF16 = torch.bfloat16


def layout(dtype: torch.dtype = BF16, page_size: int = 16) -> KVLayout:
    return KVLayout.of_one_group(2, page_size=page_size, kv_heads=8, head_dim=128, dtype=dtype)


class Library:
    """A FlashInfer that has some kernels and fails to compile the others."""

    def __init__(self, *kinds: LayerAttention, error: Exception | None = None) -> None:
        self.kinds = kinds
        self.error = error or RuntimeError("Could not find nvcc\nand more lines")
        self.asked: list[LayerAttention] = []

    def load(self, kind: LayerAttention) -> None:
        self.asked.append(kind)
        if kind not in self.kinds:
            raise self.error


def test_flashinfer_is_chosen_once_every_kind_of_layer_has_a_kernel() -> None:
    library = Library(PLAIN, LOCAL)
    assert find_obstacle(128, BF16, layout(), [PLAIN, LOCAL], library.load) == ""
    assert library.asked == [PLAIN, LOCAL]


@pytest.mark.parametrize("error", [RuntimeError("no nvcc"), FileNotFoundError("no ninja"), OSError()], ids=repr)
@pytest.mark.parametrize(
    ("kind", "text"),
    [(LOCAL, "window 1024,"), (CAPPED, "soft cap 50.0")],
)
def test_a_kind_without_a_kernel_rules_flashinfer_out(kind: LayerAttention, text: str, error: Exception) -> None:
    obstacle = find_obstacle(128, BF16, layout(), [PLAIN, kind], Library(PLAIN, error=error).load)
    assert text in obstacle and (str(error) or "OSError") in obstacle


def test_a_line_of_the_log_comes_before_each_kernel_that_may_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    lines: list[list[str]] = []
    find_obstacle(128, BF16, layout(), [PLAIN, LOCAL], lambda _: lines.append([*caplog.messages]))
    plain, local = lines[1]
    assert lines[0] == [plain]
    assert numbers_in(plain) == [128] and "bfloat16" in plain and "compiled now" in plain
    assert numbers_in(local) == [128, 1024]


def test_an_obstacle_is_one_line() -> None:
    obstacle = find_obstacle(128, BF16, layout(), [LOCAL], Library().load)
    assert "nvcc" in obstacle and "\n" not in obstacle


def test_a_library_that_is_not_installed_is_not_chosen() -> None:
    assert find_obstacle(128, BF16, layout(), [PLAIN], None).endswith("not installed")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "stored", "page_size", "text"),
    [
        (96, BF16, BF16, 16, "head_dim 96"),
        (128, torch.float32, torch.float32, 16, "float32"),
        (128, torch.float32, torch.float8_e4m3fn, 16, "queries in torch.float32"),
        (128, BF16, BF16, 1 << 20, " 4294967296 "),
    ],
)
def test_shapes_that_flashinfer_lacks_load_nothing(
    head_dim: int, dtype: torch.dtype, stored: torch.dtype, page_size: int, text: str
) -> None:
    library = Library(PLAIN)
    assert text in find_obstacle(head_dim, dtype, layout(stored, page_size), [PLAIN], library.load)
    assert library.asked == []


def test_flashinfer_serves_8_bit_keys_with_16_bit_queries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    stored, library = layout(torch.float8_e4m3fn), Library(PLAIN)
    assert find_obstacle(128, BF16, stored, [PLAIN], library.load) == ""
    assert "keys in float8_e4m3fn" in caplog.messages[0]
    missing = find_obstacle(128, BF16, stored, [PLAIN], Library().load)
    assert "float8_e4m3fn" in missing and "prebuilt" in missing


def test_triton_serves_8_bit_keys_where_it_is_faster() -> None:
    library = Library(PLAIN)
    obstacle = find_obstacle(128, BF16, layout(torch.float8_e4m3fn), [PLAIN], library.load, hopper=True)
    assert re.search(r"float8_e4m3fn\b.* faster .*\bfa2\b", obstacle)
    assert library.asked == []
    assert find_obstacle(128, BF16, layout(), [PLAIN], library.load, hopper=True) == ""


def test_the_log_names_the_kernel_of_prompts_and_why() -> None:
    assert re.fullmatch(r"fa3 .*bfloat16\b.* bfloat16", describe_kernel({"fa3"}, BF16, layout()))
    narrow = describe_kernel({"fa2"}, BF16, layout(torch.float8_e4m3fn))
    assert re.match(r"fa2 .*bfloat16\b.* float8_e4m3fn; fa3 .*\bround\b", narrow)


def test_too_little_memory_is_not_taken_for_a_missing_kernel() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        find_obstacle(128, BF16, layout(), [PLAIN], Library(error=torch.OutOfMemoryError("256 MiB")).load)


def test_a_page_table_beyond_32_bits_is_not_given_to_flashinfer() -> None:
    library = Library(PLAIN)
    assert find_obstacle(128, BF16, layout(), [PLAIN], library.load, entries=MAX_PAGE_TABLE_ENTRIES) == ""
    assert "2147483648 entries" in find_obstacle(128, BF16, layout(), [PLAIN], library.load, entries=2**31)


@pytest.mark.parametrize(
    ("sorts", "version", "directly"),
    [
        ({"fa3"}, "0.6.18", True),
        ({"fa3"}, "0.6.18.post1", True),
        ({"fa3"}, "0.6.19", False),
        ({"fa3"}, "0.6.180", False),
        ({"fa3"}, "", False),
        ({"fa2"}, "0.6.18", False),
        ({"fa2", "fa3"}, "0.6.18", False),
        (set(), "0.6.18", False),
    ],
)
def test_the_planning_function_is_called_in_the_versions_that_are_known(
    sorts: set[str], version: str, directly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version than the kernels support is logged."""
    caplog.set_level(logging.INFO, logger="tandem")
    assert can_plan_directly(sorts, version) == directly
    assert len(caplog.messages) == (sorts == {"fa3"} and not directly)


@pytest.mark.parametrize("for_hopper", [False, True])
def test_graphs_of_many_tokens_are_planned_by_what_their_slots_planner_allows(
    for_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens run in Triton; the pages of planned rows take memory where they are copied."""
    library, hopper = load_over_double(monkeypatch)
    device, heads = CpuDevice(), library.HeadShape(4, 2, 64, BF16)
    eager = library.FlashInferPlanner.allocate(
        [PLAIN, LOCAL], device.host_buffer, device.torch_device, heads, 3, 192, for_hopper
    )
    config: Any = SimpleNamespace(
        max_rows=3, max_step_tokens=512, dtype="bfloat16", page_columns=(PageColumns(0, 64),), depth=2,
        graph_tokens=(64, 384, 512),
        num_pages=lambda positions: positions // 8,
    )  # fmt: skip
    model: Any = SimpleNamespace(heads=4, kv_heads=2, head_dim=64)
    table = PageTable(torch.zeros(4, 64, dtype=torch.int32), 8, 8)
    planners = GraphPlanners(device, H200, model, config, [table], [eager])
    assert isinstance(planners(0, 256), RaggedGraphPlanner)
    planner = planners(0, 384)
    assert type(planner) is (hopper.HopperGraphPlanner if for_hopper else library.FlashInferGraphPlanner)
    copied = 0 if for_hopper else 4 * 3 * 64
    each = 2 * (library.GRAPH_PLAN_BYTES + 4 * 3 * 65) + copied
    assert further_graph_bytes(config, eager) == 3 * each, "two counts of tokens in two slots, all but one"
