"""Pieces cover a part of a tensor once, in the order of the file, whatever the shape and the size of a piece."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.loader.pieces import cut
from tandem.engine_core.loader.slots import SourceSlice


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], SourceSlice | None]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if not shape or draw(st.booleans()):
        return shape, None
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    length = draw(st.none() | st.integers(0, shape[dim] - start))
    return shape, SourceSlice(shape, dim, start, length)


@given(parts(), st.integers(1, 40))
@settings(deadline=None)
def test_pieces_make_up_the_part(drawn: tuple[tuple[int, ...], SourceSlice | None], most: int) -> None:
    shape, source = drawn
    count = torch.empty(shape).numel()
    whole = torch.arange(1, count + 1).view(shape)
    expected = whole
    if source is not None:
        length = shape[source.dim] - source.start if source.length is None else source.length
        expected = whole.narrow(source.dim, source.start, length)
    part = torch.zeros_like(expected)
    reached = 0
    for piece in cut(shape, source, most):
        read = torch.Size(piece.shape).numel()
        assert 0 < read <= most
        assert piece.start >= reached
        reached = piece.start + read
        assert not part[piece.index].any()
        part[piece.index] = whole.view(-1)[piece.start : reached].view(piece.shape)[piece.window]
    assert torch.equal(part, expected)


def test_a_slice_of_the_first_dimension_reads_no_more_than_itself() -> None:
    pieces = list(cut((100, 8), SourceSlice((100, 8), 0, 30, 20), 48))
    assert [piece.start for piece in pieces] == [240, 288, 336, 384]
    assert sum(piece.shape[0] * 8 for piece in pieces) == 20 * 8


def test_rows_longer_than_a_piece_are_cut() -> None:
    assert [piece.shape for piece in cut((2, 10), None, 4)] == [(1, 4), (1, 4), (1, 2)] * 2
