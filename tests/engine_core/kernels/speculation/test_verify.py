"""Inputs of a verification and acceptance of its drafts: the kernels against their oracles, and both by example."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.accept import accept
from tandem.engine_core.kernels.speculation.reference import DRAFTS_SHIFT, SOURCE_SHIFT
from tandem.engine_core.kernels.speculation.verify_inputs import verify_inputs
from tests.support.effort import EFFORT
from tests.support.length_tables import tables_of

TOTAL_LEN = INT_COLUMNS.index("total_len")
MAX_LEN = 16


def case(lengths: list[int], limits: list[int], drafts: list[list[int]], device: str = "cpu") -> SamplingTables:
    """Tables with these rows behind the padding row. A row knows tokens 100, 101 and so on; 50 is behind its drafts."""
    tokens = torch.full((len(lengths) + 1, MAX_LEN), 50, dtype=torch.int32)
    tables = tables_of(tokens)
    tokens[0] = 0
    for row, (length, limit, own) in enumerate(zip(lengths, limits, drafts, strict=True), 1):
        tokens[row, :length] = torch.arange(100, 100 + length)
        own = own[: MAX_LEN - length]
        tokens[row, length : length + len(own)] = torch.tensor(own, dtype=torch.int32)
        tables.lengths[row], tables.ints[row, TOTAL_LEN] = length, limit
    return SamplingTables(**{name: getattr(tables, name).to(device) for name in SamplingTables.__slots__})


def paged(rows: int, device: str) -> PageTable:
    """Pages of 4 positions: row r has pages 10 * r to 10 * r + 3, row 0 the reserved page."""
    pages = torch.arange(rows).unsqueeze(1) * 10 + torch.arange(4)
    pages[0] = 0
    return PageTable(pages.int().to(device), 4, 24)


def integers(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_a_row_computes_its_newest_token_and_its_drafts(device: str) -> None:
    tables = case([3, 3], [16, 16], [[7, 8, 9], [7, -1, 9]], device)
    samples = torch.full((2, 8), -5, dtype=torch.int32, device=device)
    found = verify_inputs(tables, [paged(3, device)], integers([1, 2], device), 4, (samples[0], samples[1]))
    assert found.input_ids.tolist()[:6] == [102, 7, 8, 9, 102, 7]
    assert found.positions.tolist() == [2, 3, 4, 5, 2, 3, 3, 3]
    assert found.rows.tolist() == [1] * 4 + [2] * 4
    assert found.slot_mapping.tolist()[0] == [242, 243, 264, 265, 482, 483, 0, 0]
    assert samples.tolist() == [[1, 1, 1, 1, 2, 2, 0, 0], [2, 3, 4, 5, 2, 3, 0, 0]]


def test_padding_and_rows_at_their_limit_are_not_sampled(device: str) -> None:
    tables = case([5, 4], [5, 5], [[7, 8], [7, 8]], device)
    samples = torch.full((2, 9), -5, dtype=torch.int32, device=device)
    found = verify_inputs(tables, [paged(3, device)], integers([0, 1, 2], device), 3, (samples[0], samples[1]))
    assert found.positions.tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 3], "the last token has no KV"
    assert found.slot_mapping[0].tolist()[:3] == [0, 0, 0]
    assert samples.tolist() == [[0] * 6 + [2, 0, 0], [0] * 6 + [3, 0, 0]]


@pytest.mark.parametrize(
    ("drafts", "sampled", "run"),
    [
        ([7, 8, 9], [7, 8, 9, 4], [7, 8, 9, 4]),
        ([7, 8, 9], [7, 8, 3, 4], [7, 8, 3]),
        ([7, 8, 9], [7, 3, 9, 4], [7, 3]),
        ([7, 8, 9], [3, 8, 9, 4], [3]),
        ([7, -1, 9], [7, 8, 9, 4], [7, 8]),
        ([-1, -1, -1], [-1, -1, -1, -1], [-1]),  # A missing draft equals no missing token.
        ([-1, -1, -1], [0, 0, 0, 0], [0]),
        ([7, 8, 9], [7, -1, 9, 4], [7, -1]),
        ([7, 8, 9], [3, -1, -1, -1], [3]),  # NaN behind the first difference.
        ([0, 8, 9], [-1, 8, 9, 4], [-1]),  # 0 in the table is not the token of a broken row.
    ],
)
def test_a_row_gets_the_leading_drafts_that_were_sampled_and_one_token_more(
    drafts: list[int], sampled: list[int], run: list[int], device: str
) -> None:
    tables = case([3, 5], [16, 16], [drafts, [7, 8, 9]], device)
    counts, sources = integers([9, 9, 9], device), integers([0, 1, 0], device)
    accept(
        tables, integers([1, 2, 0], device), 4, integers([*sampled, 1, 1, 1, 1, 7, 7, 7, 7], device), sources, counts
    )
    proposed = next((index for index, draft in enumerate(drafts) if draft < 0), 3)
    assert counts.tolist() == [len(run) | proposed << DRAFTS_SHIFT, 1 | 3 << DRAFTS_SHIFT | 1 << SOURCE_SHIFT, 0]
    assert tables.lengths.tolist() == [1, 3 + len(run), 6]
    known = [100, 101, 102, *[max(token, 0) for token in run]]
    assert tables.tokens[1, : len(known)].tolist() == known
    assert tables.tokens[0].eq(0).all(), "padding writes nothing"


@pytest.mark.parametrize(("limit", "count"), [(3, 0), (4, 1), (5, 2), (6, 3), (7, 4), (8, 4)])
def test_no_row_gets_more_tokens_than_it_may_have(limit: int, count: int, device: str) -> None:
    tables = case([3], [limit], [[7, 8, 9]], device)
    counts = integers([9], device)
    accept(tables, integers([1], device), 4, integers([7, 8, 9, 4], device), integers([0], device), counts)
    assert counts.item() & 0xFF == count
    assert tables.lengths[1] == 3 + count
    assert tables.tokens[1, 3 : 3 + count].tolist() == [7, 8, 9, 4][:count]


def test_padding_stays_as_it_is_whatever_it_may_have(device: str) -> None:
    """Several programs of one launch would write it at the same time."""
    tables = case([3], [16], [[7, 8, 9]], device)
    tables.ints[0, TOTAL_LEN] = MAX_LEN
    before, counts = int(tables.lengths[0]), integers([9, 9, 9], device)
    sampled = integers([7, 8, 9, 4] * 3, device)
    accept(tables, integers([0, 1, 0], device), 4, sampled, integers([0, 0, 0], device), counts)
    assert counts.tolist() == [0, 4 | 3 << 8, 0]
    assert tables.lengths.tolist() == [before, 7] and tables.tokens[0].eq(0).all()


tokens = st.integers(-1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="each example would compile a kernel")
@settings(max_examples=100 * EFFORT, deadline=None, print_blob=True)
@given(st.integers(2, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_kernels_equal_their_oracles(queries: int, count: int, rng: Random) -> None:
    """Few distinct tokens; limits before, inside and behind the drafts; the end of the table."""
    lengths = [rng.randint(1, MAX_LEN - 1) for _ in range(count)]
    limits = [rng.randint(length, MAX_LEN) for length in lengths]
    drafts = [[rng.choice([-1, 0, 0, 1]) for _ in range(7)] for _ in range(count)]
    tables, again = case(lengths, limits, drafts), case(lengths, limits, drafts)
    rows = integers(rng.sample(range(count + 1), count + 1), "cpu")
    samples = torch.full((2, 2, len(rows) * queries), -5, dtype=torch.int32)
    whole = paged(count + 1, "cpu")
    both = torch.cat([whole.pages, torch.randint(1, 99, (count + 1, 4)).int()], 1)
    # The second group has a window: its columns repeat after two pages.
    table = [PageTable(both[:, :4], 4, 24), PageTable(both[:, 4:], 4, 24, window=3, ring=2)]
    found = verify_inputs(tables, table, rows, queries, (samples[0, 0], samples[0, 1]))
    expected = reference.verify_inputs(again, table, rows, queries, (samples[1, 0], samples[1, 1]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert torch.equal(samples[0], samples[1])
    sampled = integers([rng.choice([-1, 0, 0, 1]) for _ in range(len(rows) * queries)], "cpu")
    sources = integers([rng.randint(0, 1) for _ in range(len(rows))], "cpu")
    counts = torch.full((2, len(rows)), -7, dtype=torch.int32)
    accept(tables, rows, queries, sampled, sources, counts[0])
    reference.accept(again, rows, queries, sampled, sources, counts[1])
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(tables.tokens, again.tokens) and torch.equal(tables.lengths, again.lengths)
