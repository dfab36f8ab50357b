"""N-gram drafts: the kernel against its oracle, and the oracle by example and by its definition."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables
from tandem.engine_core.kernels.speculation import ngram as kernel
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.ngram import propose_ngrams
from tandem.engine_core.kernels.speculation.reference import (
    FROM_CONTEXT,
    FROM_PREDICTION,
    NgramRule,
    find_ngram,
)
from tests.support.effort import EFFORT
from tests.support.length_tables import tables_of

RULE = NgramRule(1, 3, 1000)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def found(known: str, prediction: str = "", prompt_len: int = 0, rule: NgramRule = RULE) -> tuple[str, int]:
    tokens, source = find_ngram(ids(known), prompt_len, ids(prediction), rule)
    return "".join(map(chr, tokens)), source


@pytest.mark.parametrize(
    ("known", "follows"),
    [
        ("abcdXabc", "dXabc"),
        ("abcdXYbcd", "XYbcd"),
        ("abcXbcYzzbc", "Yzzbc"),  # The most recent of two equally long matches.
        ("Xabc1bc2abc", "1bc2abc"),  # A longer match before a more recent one.
        ("aaaa", "a"),
        ("abababab", "ab"),
        ("abcdef", ""),
        ("a", ""),
        ("aa", "a"),
    ],
)
def test_drafts_follow_the_longest_match_of_the_last_tokens(known: str, follows: str) -> None:
    assert found(known) == (follows, FROM_CONTEXT)


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    assert found("abXb", rule=NgramRule(1, 3, 1000))[0] == "Xb"
    assert found("abXb", rule=NgramRule(2, 3, 1000))[0] == ""


def test_matches_beyond_the_scan_are_none() -> None:
    assert found("abcXab", rule=NgramRule(2, 3, 4))[0] == "cXab"
    assert found("abcXab", rule=NgramRule(2, 3, 3))[0] == ""


@pytest.mark.parametrize(
    ("known", "prediction", "follows"),
    [
        (">", "abc", "abc"),  # Nothing is generated yet: the prediction from its beginning.
        (">a", "abc", "bc"),
        (">xy", "abc", ""),
        (">xyab", "123abcd", "cd"),
        (">ab", "abXabY", "XabY"),  # The nearest to the number of generated tokens.
        (">12345ab", "abX12abY", "Y"),
        (">12zab", "qqababX", "X"),  # Of two at the same distance, the later one.
    ],
)
def test_a_prediction_is_followed_where_it_matches(known: str, prediction: str, follows: str) -> None:
    assert found(known, prediction, 1) == (follows, FROM_PREDICTION if follows else FROM_CONTEXT)


def test_a_longer_match_in_the_context_precedes_one_in_the_prediction() -> None:
    assert found("abcXabc", "1bc2", 0) == ("Xabc", FROM_CONTEXT)
    assert found("abcXabc", "1abc2", 0) == ("2", FROM_PREDICTION)


def case(
    rows: list[list[int]], max_len: int, device: str = "cpu", predictions: list[list[int]] | None = None
) -> tuple[SamplingTables, Tensor]:
    """Tables of the given rows behind the padding row, which end at max_len, and their predictions."""
    tokens = torch.full((len(rows) + 1, max_len), 7, dtype=torch.int32)
    tables = tables_of(tokens)
    names = {name: INT_COLUMNS.index(name) for name in INT_COLUMNS}
    tables.ints[1:] = 0
    tables.ints[1:, names["total_len"]] = max_len
    tables.ints[1:, names["max_drafts"]] = 7
    texts = predictions or [[]] * len(rows)
    table = torch.full((len(rows) + 1, max(map(len, texts), default=0)), -1, dtype=torch.int32)
    for row, (known, text) in enumerate(zip(rows, texts, strict=True), 1):
        tokens[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        tables.lengths[row] = len(known)
        table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        tables.ints[row, names["prediction_len"]] = len(text)
    moved = {name: getattr(tables, name).to(device) for name in SamplingTables.__slots__}
    return SamplingTables(**moved), table.to(device)


def check(tables: SamplingTables, predictions: Tensor, drafts: int, rule: NgramRule) -> Tensor:
    """Assert that the kernel writes what the oracle does, and nothing else. Returns the token table."""
    rows = torch.arange(len(tables.tokens), dtype=torch.int32, device=tables.tokens.device).flip(0)
    sources, again = torch.full_like(rows, 9), torch.full_like(rows, 9)
    before, lengths = tables.tokens.clone(), tables.lengths.clone()
    propose_ngrams(tables, predictions, rows, drafts, sources, rule)
    written = tables.tokens.clone()
    tables.tokens.copy_(before)
    reference.propose_ngrams(tables, predictions, rows, drafts, again, rule)
    assert torch.equal(written, tables.tokens)
    assert torch.equal(sources, again)
    assert torch.equal(lengths, tables.lengths)
    return written


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="each example would compile a kernel")
@settings(max_examples=60 * EFFORT, deadline=None, print_blob=True)
@given(
    st.lists(st.tuples(texts, st.lists(st.integers(0, 2), max_size=40)), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 50),
    st.integers(0, 45),
    st.sampled_from([8, 1024]),
    st.randoms(use_true_random=False),
)
def test_drafts_equal_the_oracle(
    rows: list[tuple[list[int], list[int]]],
    drafts: int,
    min_match: int,
    more: int,
    max_scan: int,
    room: int,
    block: int,
    rng: Random,
) -> None:
    """Few distinct tokens, so that matches of every length occur, and limits inside the drafts."""
    known, predictions = [text for text, _ in rows], [text for _, text in rows]
    longest = max(map(len, known))
    tables, table = case(known, longest + 1 + room, predictions=predictions)
    for row, text in enumerate(known, 1):
        tables.ints[row, INT_COLUMNS.index("total_len")] = rng.randint(len(text), longest + 1 + room)
        tables.ints[row, INT_COLUMNS.index("prompt_len")] = rng.randint(1, len(text))
        tables.ints[row, INT_COLUMNS.index("max_drafts")] = rng.choice([0, 1, 3, 7])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "BLOCK", block)
        check(tables, table, drafts, NgramRule(min_match, min_match + more, max_scan))


def test_missing_drafts_are_minus_one(device: str) -> None:
    tables, table = case([ids("abcd"), ids("abcXab"), ids("ababab")], 20, device)
    written = check(tables, table, 5, RULE)
    assert written[1, 4:10].tolist() == [-1] * 5 + [7]
    assert written[2, 6:12].tolist() == [*ids("cXabc"), 7]
    assert written[3, 6:12].tolist() == [*ids("ababa"), 7], "a period repeats"
    assert (written[0] == 7).all()


def test_no_draft_is_the_last_token_of_a_row(device: str) -> None:
    """Its KV is never computed: there is no page for it."""
    tables, table = case([ids("abab")] * 4, 20, device)
    tables.ints[1:, INT_COLUMNS.index("total_len")] = torch.tensor([4, 5, 6, 8], device=device)
    written = check(tables, table, 4, RULE)
    counts = [(written[row, 4:8] >= 0).sum().item() for row in (1, 2, 3, 4)]
    assert counts == [0, 0, 1, 3]


def test_rows_at_the_end_of_the_table_write_nothing_behind_it(device: str) -> None:
    tables, table = case([ids("abab"), ids("abab")], 5, device)
    before = tables.tokens[:, :4].clone()
    assert torch.equal(check(tables, table, 7, RULE)[:, :4], before)


@pytest.mark.parametrize(("scan", "draft"), [(3, -1), (4, ord("c")), (5, ord("c"))])
def test_the_scan_reaches_its_last_position(device: str, scan: int, draft: int) -> None:
    """The only match ends four positions before the newest token."""
    written = check(*case([ids("abcXab")], 20, device), 1, NgramRule(2, 3, scan))
    assert written[1, 6] == draft


def test_no_position_is_skipped_between_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has one match, at another position."""
    monkeypatch.setattr(kernel, "BLOCK", 8)
    texts = [[99 if index in (at, 29) else index for index in range(30)] for at in range(29)]
    tables, table = case(texts, 40, device)
    written = check(tables, table, 1, RULE)
    assert written[1:, 30].tolist() == [*range(1, 29), 99]


@pytest.mark.parametrize(("min_match", "drafts"), [(2, "c"), (3, "")])
def test_a_match_may_cover_the_whole_row_but_no_more(device: str, min_match: int, drafts: str) -> None:
    tables, table = case([ids("ab")], 20, device, [ids("abc")])
    tables.ints[1, INT_COLUMNS.index("prompt_len")] = 1
    written = check(tables, table, 2, NgramRule(min_match, 3, 1000))
    assert written[1, 2:4].tolist() == [*ids(drafts), -1, -1][:2]


def test_long_texts_equal_the_oracle(device: str) -> None:
    """Several blocks, of the context and of the prediction."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 9, (size,), generator=generator).tolist() for size in (1023, 1024, 1025, 3000)]
    predictions = [torch.randint(0, 9, (size,), generator=generator).tolist() for size in (1025, 2, 1024, 2500)]
    for rule in (NgramRule(2, 4, 8192), NgramRule(2, 4, 1500)):
        check(*case(rows, 3100, device, predictions), 7, rule)
        check(*case(rows, 3100, device), 3, rule)
