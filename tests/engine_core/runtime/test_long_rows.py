"""Decode steps with and without long rows, which graphs of their own serve where spare programs cost the others."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tandem.engine_core.kernels.attention import extra_splits
from tandem.engine_core.kernels.attention.extra_splits import ExtraSplits
from tandem.engine_core.runtime import cuda_forward
from tests.engine_core.runtime.test_recorded_graphs import DRAWN, FULL, GREEDY, answer, build, recorded
from tests.fakes.recording_gpu import oracle_attention
from tests.support.engine_driver import DrivenEngine
from tests.support.plan_recording import runtime_of

REACH = 24
"""Most positions of a row that is not long, in these tests."""
Shared = list[tuple[int, int, int]]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """Rows, longest row and spare programs of each decode step or part of a step that ran."""
    found: Shared = []

    def note(positions: Tensor, _splits: int, count: int, **_launch: bool) -> ExtraSplits | None:
        if len(positions):
            found.append((len(positions), int(positions.max()) + 1, count))
        return ExtraSplits(torch.zeros(2 * len(positions) + count, dtype=torch.int32), count) if count else None

    monkeypatch.setattr(extra_splits, "BALANCE", REACH)
    with oracle_attention(), patch.object(cuda_forward, "assign_extra_splits", note):
        yield found


def lengths(driven: DrivenEngine) -> dict[int, int]:
    """Return the longest row that the first graph of each bucket serves; 0 where it is the only one."""
    graphs = runtime_of(driven).graphs
    assert graphs is not None
    for slot in graphs.decode:
        assert all((step.long_context_graph is step.forward) == (step.max_short_len == 0) for step in slot.values())
    return {rows: step.max_short_len for rows, step in graphs.decode[0].items()}


def test_a_step_takes_spare_programs_only_when_a_row_is_long(shared: Shared, tmp_path: Path) -> None:
    """The third row has 19 positions at first and 27 at last; each token is compared with a dense model's."""
    driven = build(tmp_path)
    assert lengths(driven) == {1: 0, 4: REACH}, "the programs of a single row combine their results in any case"
    shared.clear()
    answer(driven, [GREEDY, DRAWN, FULL])
    steps = [(longest, count) for rows, longest, count in shared if rows == 4]
    assert {count for longest, count in steps if longest <= REACH} == {0}
    assert {count for longest, count in steps if longest > REACH} == {1}
    assert all(count for rows, _, count in shared if rows != 4), "other steps are ready for long rows"


@pytest.mark.usefixtures("shared")
def test_each_slot_has_a_graph_of_long_rows(tmp_path: Path) -> None:
    driven = build(tmp_path)
    answer(driven, [structs.replace(GREEDY, max_tokens=16)] * 3)
    graphs = runtime_of(driven).graphs
    assert graphs is not None
    assert all(
        recorded(graph).replays for slot in graphs.decode for graph in (slot[4].forward, slot[4].long_context_graph)
    )


def test_no_further_graph_is_captured_where_no_row_can_be_long(shared: Shared, tmp_path: Path) -> None:
    driven = build(tmp_path, max_len=REACH)
    assert lengths(driven) == {1: 0, 4: 0}
    assert not any(count for _, _, count in shared)
