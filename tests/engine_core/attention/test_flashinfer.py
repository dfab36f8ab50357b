"""Inputs that the planner passes to FlashInfer, recorded by a fake library."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.kernels.page_table import PageTable
from tests.fakes.flashinfer_library import load_over_double

LAYER = LayerAttention(0.125, window=32)
PAGE = 8


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_over_double(monkeypatch)[0]


def planner_of(module: ModuleType, rows: int, layers: tuple[LayerAttention, ...] = (LAYER,)) -> Any:
    def pinned(count: int) -> Tensor:
        return torch.full((count,), -9, dtype=torch.int32)

    heads = module.HeadShape(4, 2, 64, torch.bfloat16)
    return module.FlashInferPlanner.allocate(layers, pinned, torch.device("cpu"), heads, rows, 64)


@pytest.mark.parametrize("batch", [None, 5], ids=["eager", "padded for a graph"])
def test_a_plan_has_the_length_of_each_rows_last_page(flashinfer: ModuleType, batch: int | None) -> None:
    """Contexts that end at, before and after the end of a page; a padding row without queries has no pages."""
    planner = planner_of(flashinfer, 8)
    planner.batch = batch
    pages = torch.arange(32, dtype=torch.int32).view(4, 8)
    spans = [Span(0, 0, 0, 8), Span(1, 8, 14, 1), Span(2, 9, 8, 9)]
    step = planner.plan(spans, [PageTable(pages, PAGE, PAGE)])
    queries, tables, page_ids, last = planner.wrappers[LAYER].given[:4]
    padding = 0 if batch is None else batch - len(spans)
    assert queries == [0, 8, 9, 18] + [18] * padding
    assert tables == [0, 1, 3, 6] + [6] * padding
    assert page_ids == [0, 8, 9, 16, 17, 18]
    assert last[:3] == [8, 7, 1]
    assert step.tokens == 18
    options = planner.wrappers[LAYER].options
    assert options["seq_lens"] == [8, 15, 17] + [0] * padding
    assert (options["sm_scale"], options["window_left"], options["causal"]) == (0.125, 31, True)


def test_values_of_8_bits_are_scaled_after_the_library_has_read_them(flashinfer: ModuleType) -> None:
    """A graph's padding after the planned queries is unchanged."""
    planner = planner_of(flashinfer, 8)
    fp8 = torch.float8_e4m3fn
    planner.heads = flashinfer.HeadShape(4, 2, 64, torch.bfloat16, fp8)
    step = planner.plan([Span(0, 0, 0, 3)], [PageTable(torch.ones(1, 1, dtype=torch.int32), PAGE, PAGE)])
    options = planner.wrappers[LAYER].options
    assert (options["q_data_type"], options["kv_data_type"]) == (torch.bfloat16, fp8)
    query, pool = torch.ones(5, 4, 64), torch.zeros(2 * PAGE, 2, 64).to(fp8)
    out = torch.full_like(query, 7)
    step.run_into(out, query, pool, pool, LAYER, torch.tensor([3.0, 0.5]), overlaps_decode=False)
    assert (out[:3] == 0.5).all() and (out[3:] == 7).all()


def test_a_graph_of_more_rows_than_its_planner_is_refused(flashinfer: ModuleType) -> None:
    with pytest.raises(AssertionError, match=r"\b9 rows\b.* 8$"):
        planner_of(flashinfer, 8).for_graph(9, [64])


def test_the_plan_of_a_graph_is_made_before_the_pages_of_its_rows_are_known(flashinfer: ModuleType) -> None:
    """The previous step may still run; this step's page table updates come later."""
    pages = torch.zeros(4, 8, dtype=torch.int32)
    table = PageTable(pages, PAGE, PAGE)
    layers = LAYER, LayerAttention(0.125)
    graph = flashinfer.FlashInferGraphPlanner.build(planner_of(flashinfer, 8, layers), 3, 24, [16], [table])
    (held,) = graph.planner.page_ids
    graph.plan([Span(2, 0, 0, 12), Span(1, 12, 3, 5)])
    for layer in layers:
        wrapper = graph.planner.wrappers[layer]
        assert wrapper.buffers[2] is held, "each kind of layer reads the same pages"
        _, tables, page_ids, _ = wrapper.given[:4]
        assert (tables, page_ids, held.tolist()) == ([0, 2, 3, 3], [], [0] * 16)
    pages[2, :2], pages[1, 0] = torch.tensor([7, 5]), 9
    graph.gather_pages()
    assert held.tolist() == [7, 5, 9] + [0] * 13
    with pytest.raises(AssertionError, match=r"^17 pages\b.* 16$"):
        graph.plan([Span(1, 0, 0, 17 * PAGE)])


@pytest.mark.parametrize("values", [[7], [3, 9, 4], [0] * 63 + [131_072]])
def test_row_lengths_iterate_over_their_maximum(flashinfer: ModuleType, values: list[int]) -> None:
    host = torch.tensor([1_000_000, *values], dtype=torch.int32)
    lengths = host[1:].as_subclass(flashinfer.RowLengths).cpu().flatten()
    assert [int(value) for value in lengths] == [max(values)], "what `max` compares"
    assert max(lengths).item() == max(values)


def test_row_lengths_are_ordinary_tensors_otherwise(flashinfer: ModuleType) -> None:
    lengths = torch.tensor([3, 9, 4], dtype=torch.int32).as_subclass(flashinfer.RowLengths)
    copied = torch.zeros(3, dtype=torch.int32)
    copied.copy_(lengths)
    assert copied.tolist() == lengths.tolist() == [3, 9, 4]
    assert len(lengths) == 3
    assert type(lengths + 1) is torch.Tensor, "results have no subclass"


LOCAL = [LayerAttention(0.125, window=12, group=group) for group in (1, 2)]


def tables_of_groups() -> tuple[Tensor, list[PageTable]]:
    """Two rows of one group that keeps 8 pages, and of two that keep 3 of a window of 12 positions."""
    pages = torch.arange(2 * 20, dtype=torch.int32).view(2, 20)
    return pages, [
        PageTable(pages[:, :8], PAGE, PAGE),
        *(PageTable(pages[:, first : first + 6], PAGE, PAGE, window=12, ring=3) for first in (8, 14)),
    ]


def test_groups_of_one_window_share_a_plan_that_begins_at_the_first_page_of_the_window(flashinfer: ModuleType) -> None:
    """Row 1 sees positions 29 to 40 in pages 3 to 5, which are in columns 0 to 2; row 0 sees all of its pages."""
    full = LayerAttention(0.125)
    planner = planner_of(flashinfer, 8, (full, *LOCAL))
    _, tables = tables_of_groups()
    step = planner.plan([Span(1, 0, 40, 1), Span(0, 1, 0, 10)], tables)
    assert step.wrappers[LOCAL[0]] is step.wrappers[LOCAL[1]] is not step.wrappers[full]
    queries, before, page_ids, last = step.wrappers[full].given[:4]
    assert (queries, before, last) == ([0, 1, 11], [0, 6, 8], [1, 2])
    assert page_ids == [20, 21, 22, 23, 24, 25, 0, 1]
    assert step.wrappers[full].options["seq_lens"] == [41, 10]
    queries, before, page_ids, last = step.wrappers[LOCAL[0]].given[:4]
    assert (queries, before, last) == ([0, 1, 11], [0, 3, 5], [1, 2])
    assert page_ids == [28, 29, 30, 8, 9]
    options = step.wrappers[LOCAL[0]].options
    assert (options["seq_lens"], options["window_left"]) == ([41 - 24, 10], 11)
    pool = torch.zeros(8 * PAGE, 2, 64)
    read = []
    for layer in (LOCAL[1], full, LOCAL[0]):
        step.run(torch.zeros(11, 4, 64), pool, pool, layer)
        read.append(step.wrappers[layer]._paged_kv_indices_buf.tolist())
    assert read == [[34, 35, 36, 14, 15], [20, 21, 22, 23, 24, 25, 0, 1], [28, 29, 30, 8, 9]]


def test_a_window_begins_inside_a_ring(flashinfer: ModuleType) -> None:
    """Position 33 sees positions 22 to 33 in pages 2 to 4, which are in columns 2 to 4 of the doubled ring."""
    planner = planner_of(flashinfer, 8, (LayerAttention(0.125), *LOCAL))
    _, tables = tables_of_groups()
    step = planner.plan([Span(1, 0, 33, 1)], tables)
    assert step.wrappers[LOCAL[0]].given[2] == [30, 31, 32]
    assert step.wrappers[LOCAL[0]].options["seq_lens"] == [34 - 16]


def test_pages_of_each_group_are_gathered_for_a_graph(flashinfer: ModuleType) -> None:
    planner = planner_of(flashinfer, 8, (LayerAttention(0.125), *LOCAL))
    pages, tables = tables_of_groups()
    graph = flashinfer.FlashInferGraphPlanner.build(planner, 3, 24, [16, 9, 9], tables)
    graph.plan([Span(1, 0, 33, 7)])
    pages += 100
    graph.gather_pages()
    assert [ids[:3].tolist() for ids in graph.planner.page_ids] == [[120, 121, 122], [130, 131, 132], [136, 137, 138]]
    pool = torch.zeros(8 * PAGE, 2, 64)
    for layer in LOCAL:
        graph.step.run(torch.zeros(7, 4, 64), pool, pool, layer)
        assert graph.step.wrappers[layer]._paged_kv_indices_buf is graph.planner.page_ids[layer.group]
