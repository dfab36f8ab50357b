"""Regions of a parameter that slots fill, against a set of indices."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.loader.fit import FilledRegions
from tandem.engine_core.loader.slots import WeightSlot

PARAMETER = torch.empty(30)
SLOTS = st.tuples(st.integers(0, 20), st.integers(0, 9)).map(lambda found: WeightSlot("w", PARAMETER, 0, *found))


@given(st.lists(SLOTS, max_size=12), SLOTS)
def test_a_slot_is_covered_if_all_its_indices_are_filled(filled: list[WeightSlot], slot: WeightSlot) -> None:
    indices = {index for other in filled for index in range(other.start, other.start + other.length)}
    assert FilledRegions(filled).cover(slot) == (set(range(slot.start, slot.start + slot.length)) <= indices)
