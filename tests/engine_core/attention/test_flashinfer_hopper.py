"""Plans of prompts in graphs on Hopper, recorded by a fake of FlashInfer."""

from typing import Any

import pytest
import torch

from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.kernels.page_table import PageTable
from tests.fakes.flashinfer_library import Wrapper, load_over_double

KINDS = LayerAttention(0.125, window=32), LayerAttention(0.5, softcap=20.0)
PAGE, WIDTH, ROWS, TOKENS = 8, 6, 4, 64


def build(monkeypatch: pytest.MonkeyPatch, *tables: PageTable, kinds: tuple[LayerAttention, ...] = KINDS) -> Any:
    library, hopper = load_over_double(monkeypatch)
    heads = library.HeadShape(4, 2, 64, torch.bfloat16)
    eager = library.FlashInferPlanner.allocate(
        kinds,
        lambda count: torch.zeros(count, dtype=torch.int32),
        torch.device("cpu"),
        heads,
        ROWS,
        64,
        for_hopper=True,
    )
    return hopper.HopperGraphPlanner.build(eager, ROWS, TOKENS, list(tables))


def table_of(rows: int) -> PageTable:
    return PageTable(torch.arange(rows * WIDTH, dtype=torch.int32).view(rows, WIDTH), PAGE, PAGE)


def wrappers(planner: Any) -> list[Wrapper]:
    return [planner.step.wrappers[kind] for kind in KINDS]


def test_the_library_plans_a_full_step_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses the kernel and keeps the options of each kind; it gets no pages: their buffer is the page table."""
    table = table_of(5)
    planner = build(monkeypatch, table)
    assert planner.step.tokens == TOKENS
    for wrapper, kind, window in zip(wrappers(planner), KINDS, (31, -1), strict=True):
        assert wrapper.for_graph and wrapper.buffers[2].data_ptr() == table.pages.data_ptr()
        assert [len(buffer) for buffer in wrapper.buffers] == [ROWS + 1, ROWS + 1, table.pages.numel(), ROWS]
        assert wrapper.given == ([0, *[TOKENS] * ROWS], [0] * (ROWS + 1), [], [1] * ROWS, 4, 2, 64, PAGE)
        assert wrapper.options == {
            "causal": True,
            "sm_scale": kind.scale,
            "window_left": window,
            "logits_soft_cap": kind.softcap,
            "q_data_type": torch.bfloat16,
            "kv_data_type": None,
            "seq_lens": [TOKENS, 0, 0, 0],
            "max_token_per_sequence": TOKENS,
        }
        assert wrapper.planned == []


def test_a_plan_names_the_first_pages_of_its_rows_in_the_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order; as many as fit, fewer, and none; the same for each kind of layer."""
    planner = build(monkeypatch, table_of(5))
    planner.plan([Span(2, 0, 0, 12), Span(1, 12, 3, 5), Span(4, 17, 40, 1), Span(3, 18, 1, 46)])
    planner.plan([Span(3, 0, 9, 2)])
    planner.plan([])
    planner.gather_pages()
    for wrapper, window in zip(wrappers(planner), (31, -1), strict=True):
        full, one, none = wrapper.planned
        assert full[3:] == one[3:] == none[3:] == (TOKENS, ROWS, 4, 2, PAGE, True, 64, 64, True, window)
        assert full[0] == [0, 12, 17, 18, 64]
        assert full[1][:ROWS] == [12, 6, 24, 18]
        assert full[2] == [12, 8, 41, 47]
        assert (one[0], one[1][0], one[2]) == ([0, 2, 2, 2, 2], 18, [11, 0, 0, 0])
        assert (none[0], none[2]) == ([0] * 5, [0] * 4)


def test_more_rows_than_a_graph_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = build(monkeypatch, table_of(9))
    with pytest.raises(AssertionError, match=r"^5 rows\b.* 4$"):
        planner.plan([Span(row, row, 0, 1) for row in range(5)])


def test_a_full_step_must_fit_the_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="64 tokens, 6 entries"):
        build(monkeypatch, table_of(1))


def test_groups_with_a_window_are_planned_once_from_the_first_page_that_they_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row at position 33 sees from position 22 on: its pages 2 to 4, in columns 2 to 4 of the doubled ring of 3."""
    pages = torch.arange(5 * 20, dtype=torch.int32).view(5, 20)
    tables = [
        PageTable(pages[:, :8], PAGE, PAGE),
        *(PageTable(pages[:, first : first + 6], PAGE, PAGE, window=12, ring=3) for first in (8, 14)),
    ]
    full, *local = [LayerAttention(0.125), *(LayerAttention(0.125, window=12, group=group) for group in (1, 2))]
    planner = build(monkeypatch, *tables, kinds=(full, *local))
    planner.plan([Span(2, 0, 0, 12), Span(4, 12, 33, 3)])
    step = planner.step
    assert step.wrappers[local[0]] is step.wrappers[local[1]]
    ((queries, first, lengths, *_),) = step.wrappers[full].planned
    assert (queries[:3], first[:2], lengths[:2]) == ([0, 12, 15], [40, 80], [12, 36])
    ((queries, first, lengths, *_),) = step.wrappers[local[0]].planned
    assert (queries[:3], first[:2], lengths[:2]) == ([0, 12, 15], [40, 80 + 2], [12, 36 - 16])
    assert [ids[first[1]].item() for ids in step.page_ids] == [82, 90, 96]
