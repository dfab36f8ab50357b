"""Indices of masks on the host."""

from tandem.engine_core.contracts import InternedList
from tandem.engine_core.runtime.masks import index_masks
from tests.fakes.constraint import FakeConstraint

A, B, C = (FakeConstraint(name) for name in "abc")
INDICES = {7: 0, 3: 1, 5: 2}


def test_masks_of_all_rows_are_indexed_once() -> None:
    masks = InternedList([(7, A), (3, B), (5, C)])
    indexed = index_masks(masks, INDICES)
    assert indexed == [(A, 0), (B, 1), (C, 2)]
    assert index_masks(masks, dict(INDICES)) is indexed, "as in the next step"


def test_fewer_masks_have_the_indices_of_their_rows() -> None:
    masks = InternedList([(7, A), (5, C)])
    assert index_masks(masks, INDICES) == [(A, 0), (C, 2)]
    assert index_masks(masks, {7: 0, 5: 1}) == [(A, 0), (C, 1)], "of a step that has no others"
    assert index_masks([(3, B)], INDICES) == [(B, 1)]
