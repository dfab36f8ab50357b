"""Passes of a draft model: the kernels against their oracles, and both by example."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.draft_steps import draft_inputs, note_accepted, write_drafts
from tandem.engine_core.kernels.speculation.reference import DRAFTS_SHIFT, DraftState
from tests.engine_core.kernels.speculation.test_verify import MAX_LEN, case, integers, paged
from tests.support.effort import EFFORT

MAX_DRAFTS = INT_COLUMNS.index("max_drafts")


def drafting(lengths: list[int], limits: list[int], wanted: list[int], device: str = "cpu") -> SamplingTables:
    tables = case(lengths, limits, [[] for _ in lengths], device)
    tables.ints[1:, MAX_DRAFTS] = torch.tensor(wanted, device=device)
    return tables


def state_of(lengths: list[int], device: str) -> DraftState:
    return DraftState(integers(lengths, device), integers([7] * len(lengths), device))


def test_the_first_pass_computes_what_the_draft_model_lacks(device: str) -> None:
    """Rows that lack one, two and too many positions, one that may have no draft, and padding."""
    tables, state = drafting([6, 6, 6, 6], [16] * 4, [3, 3, 3, 0], device), state_of([0, 5, 4, 1, 5], device)
    samples, index = torch.full((2, 5), -5, dtype=torch.int32, device=device), integers([9] * 5, device).long()
    rows = integers([1, 2, 3, 4, 0], device)
    found = draft_inputs(tables, [paged(5, device)], state, rows, 2, (samples[0], samples[1]), index, True)
    assert found.positions.tolist() == [5, 5, 4, 5, 1, 2, 0, 0, 0, 0]
    assert found.input_ids.tolist()[:6] == [105, 105, 104, 105, 101, 102]
    assert [slot > 0 for slot in found.slot_mapping[0].tolist()] == [True, False, *[True] * 4, *[False] * 4]
    assert samples.tolist() == [[1, 2, 0, 0, 0], [5, 5, 0, 0, 0]] and index.tolist() == [0, 3, 5, 6, 8]
    assert state.lengths.tolist() == [0, 6, 6, 3, 5] and state.counts.tolist()[1:] == [0] * 4


def test_each_draft_is_the_input_of_the_next(device: str) -> None:
    tables, state = drafting([3, 3], [16, 5], [3, 3], device), state_of([0, 2, 2], device)
    samples, index = torch.zeros((2, 2), dtype=torch.int32, device=device), integers([0, 0], device).long()
    rows, found = integers([1, 2], device), list[list[int]]()
    for number, sampled in enumerate(([7, 8], [9, 6], [-1, 6])):
        given = tables, [paged(3, device)], state, rows, 1 if number else 2, (samples[0], samples[1]), index
        found.append(draft_inputs(*given, number == 0).input_ids.tolist())
        write_drafts(tables, state, rows, samples[0], integers(sampled, device))
    assert found == [[102, 102, 102, 102], [7, 100], [9, 100]]
    assert tables.tokens[1, 3:6].tolist() == [7, 9, -1], "NaN gives no draft"
    assert tables.tokens[2, 3:6].tolist() == [8, -1, -1], "the token before the last has no draft"


@pytest.mark.parametrize(
    ("drafts", "new", "expected"), [(3, 1, 7), (3, 2, 8), (3, 3, 9), (3, 4, 9), (2, 3, 8), (1, 1, 7), (1, 2, 7)]
)
def test_accepted_drafts_are_known_but_for_the_last(drafts: int, new: int, expected: int, device: str) -> None:
    """A row of 7 tokens had some drafts; another had none, and keeps its number."""
    tables, state = drafting([7 + new, 8], [16, 16], [3, 3], device), state_of([0, 7, 4], device)
    counts = integers([new | drafts << DRAFTS_SHIFT, 1, 0], device)
    note_accepted(tables, state, integers([1, 2, 0], device), counts)
    assert state.lengths.tolist() == [0, expected, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="each example would compile a kernel")
@settings(max_examples=60 * EFFORT, deadline=None, print_blob=True)
@given(st.integers(2, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_kernels_equal_their_oracles(queries: int, count: int, rng: Random) -> None:
    """Over whole steps of up to 4 drafts, at limits and at the end of the table."""
    lengths = [rng.randint(1, MAX_LEN - 1) for _ in range(count)]
    limits = [rng.randint(length, MAX_LEN) for length in lengths]
    wanted = [rng.randint(0, 4) for _ in range(count)]
    drafted = [0, *[rng.randint(0, length) for length in lengths]]
    both = [drafting(lengths, limits, wanted) for _ in range(2)]
    states = [state_of(drafted, "cpu") for _ in range(2)]
    rows = integers(rng.sample(range(count + 1), count + 1), "cpu")
    whole = paged(count + 1, "cpu")
    pages = torch.cat([whole.pages, torch.randint(1, 99, (count + 1, 4)).int()], 1)
    table = [PageTable(pages[:, :4], 4, 24), PageTable(pages[:, 4:], 4, 24, window=3, ring=2)]
    samples, index = torch.full((2, 2, len(rows)), -5, dtype=torch.int32), torch.zeros((2, len(rows))).long()
    for number in range(rng.randint(1, 4)):
        sampled = integers([rng.choice([-1, 5, 6]) for _ in rows], "cpu")
        found = []
        for kernels, tables, state, own, at in zip(
            ((draft_inputs, write_drafts), (reference.draft_inputs, reference.write_drafts)),
            both, states, samples, index, strict=True,
        ):  # fmt: skip
            given = tables, table, state, rows, 1 if number else queries, (own[0], own[1]), at, number == 0
            found.append(kernels[0](*given))
            kernels[1](tables, state, rows, own[0], sampled)
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert torch.equal(samples[0], samples[1]) and torch.equal(index[0], index[1])
    counts = integers([rng.randint(1, 4) | rng.randint(0, 4) << DRAFTS_SHIFT for _ in rows], "cpu")
    note_accepted(both[0], states[0], rows, counts)
    reference.note_accepted(both[1], states[1], rows, counts)
    assert torch.equal(both[0].tokens, both[1].tokens)
    for ours, theirs in zip(states[0], states[1], strict=True):
        assert torch.equal(ours[1:], theirs[1:])
