"""Rows get the tokens that they get without drafts: sampling and acceptance together, over a model of hashes."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference.sampling import SEGMENT, sample
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tandem.engine_core.kernels.speculation.accept import accept as accept_kernel
from tandem.engine_core.kernels.speculation.reference import accept, verify_inputs
from tandem.engine_core.sampling.sampler import RANDOM, Mode
from tandem.engine_core.sampling.torch_sampler import TorchSampler, gather
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tests.support.sampling_case import (
    EVERYTHING,
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    ask_everything,
    make_case,
    truncations,
)

TOTAL_LEN = INT_COLUMNS.index("total_len")
VOCAB, MAX_LEN = 40, 40
Drafter = Callable[[list[int], list[int], int, random.Random], list[int]]
"""Drafts for known tokens, given those that will follow: (known, following, number, rng) -> drafts, -1 for none."""


def perfect(_known: list[int], following: list[int], count: int, _rng: random.Random) -> list[int]:
    return [*following[:count], *[-1] * count][:count]


def adversarial(_known: list[int], following: list[int], count: int, rng: random.Random) -> list[int]:
    """Right up to one that is not, then right again."""
    drafts = perfect(_known, following, count, rng)
    wrong = rng.randrange(count)
    drafts[wrong] = (drafts[wrong] + 1) % VOCAB
    return drafts


def arbitrary(known: list[int], following: list[int], count: int, rng: random.Random) -> list[int]:
    """Anything, of any number."""
    drafts = [rng.randrange(VOCAB) for _ in range(count)]
    right = perfect(known, following, count, rng)
    mixed = [own if rng.random() < 0.6 else other for own, other in zip(right, drafts, strict=True)]
    return [*mixed[: rng.randint(0, count)], *[-1] * count][:count]


DRAFTERS = (perfect, adversarial, arbitrary)


@cache
def logits_of(history: tuple[int, ...]) -> Tensor:
    """Return logits that every token of the history changes."""
    generator = torch.Generator().manual_seed(hash(history) & 0xFFFF_FFFF)
    return torch.randn(VOCAB, generator=generator) * 2


def histories(tables: SamplingTables, rows: Tensor, positions: Tensor) -> Tensor:
    found = [
        logits_of(tuple(tables.tokens[row, : position + 1].tolist()))
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
    ]
    return torch.stack(found)


def tables_of_requests(count: int, seed: int) -> SamplingTables:
    """Rows with prompts only, and random parameters of every kind."""
    case = make_case(count, VOCAB, seed, MAX_LEN)
    ask_everything(case, seed)
    truncations(case, [0, 0, 3, 20], [1.0, 0.9, 0.5], [0.0, 0.0, 0.1])
    case.ints[1:, TOTAL_LEN] = torch.randint(MAX_LEN // 2 + 1, MAX_LEN + 1, (len(case.ints) - 1,))
    case.lengths[1:] = case.ints[1:, PROMPT_LEN].int()
    tables = case.tables
    for row in range(1, len(case.tokens)):
        tables.tokens[row, case.lengths[row] :] = 0
    return tables


def copy_of(tables: SamplingTables) -> SamplingTables:
    return SamplingTables(**{name: getattr(tables, name).clone() for name in SamplingTables.__slots__})


def sample_plain(tables: SamplingTables) -> None:
    """Sample each row to its end, one token a step."""
    sampler, rows = TorchSampler(tables), torch.arange(1, len(tables.tokens), dtype=torch.int32)
    while len(rows := rows[tables.lengths[rows.long()] < tables.ints[rows.long(), TOTAL_LEN]]):
        positions = tables.lengths[rows.long()] - 1
        logits = histories(tables, rows, positions)
        sampler.sample(SamplingBatch(logits, rows, positions, torch.zeros_like(rows), None, EVERYTHING, MAX_LEN))


def sample_verified(
    tables: SamplingTables, expected: Tensor, drafter: Drafter, draw: Callable[[SamplingBatch], None], seed: int
) -> list[int]:
    """Sample each row to its end, from drafts of a number that changes each step. Return the lengths of all runs."""
    rng = random.Random(seed)
    limits = tables.ints[:, TOTAL_LEN].tolist()
    page_table = PageTable(torch.zeros(len(limits), MAX_LEN, dtype=torch.int32), 1, 1)
    rows, runs = torch.arange(len(limits), dtype=torch.int32), []
    sources = torch.zeros_like(rows)
    while any(tables.lengths[row] < limits[row] for row in range(1, len(limits))):
        queries = rng.randint(2, 8)
        for row in range(1, len(limits)):
            length = int(tables.lengths[row])
            following = expected[row, length : limits[row]].tolist()
            drafts = drafter(tables.tokens[row, :length].tolist(), following, queries - 1, rng)[: MAX_LEN - length]
            tables.tokens[row, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        samples = torch.zeros(2, len(rows) * queries, dtype=torch.int32)
        verify_inputs(tables, [page_table], rows, queries, (samples[0], samples[1]))
        logits, sampled = histories(tables, samples[0], samples[1]), torch.full_like(samples[0], -7)
        before = tables.tokens.clone(), tables.lengths.clone()
        draw(SamplingBatch(logits, samples[0], samples[1], sampled, None, EVERYTHING, MAX_LEN, publish=False))
        assert torch.equal(before[0], tables.tokens) and torch.equal(before[1], tables.lengths)
        counts = torch.zeros_like(rows)
        accept(tables, rows, queries, sampled, sources, counts)
        runs += (counts[1:] & 0xFF).tolist()
    return runs


def check(count: int, seed: int, drafter: Drafter, on_kernels: bool = False) -> None:
    plain = tables_of_requests(count, seed)
    verified = copy_of(plain)
    sample_plain(plain)
    scratch = SamplingScratch.allocate(VOCAB, 256, SEGMENT, SEGMENT, 64, 64, torch.device("cpu"))
    kernels = TritonSampler(verified, scratch)
    draw = partial(kernels.launch, Mode.FULL) if on_kernels else TorchSampler(verified).sample
    runs = sample_verified(verified, plain.tokens, drafter, draw, seed)
    assert torch.equal(plain.lengths, verified.lengths)
    for row, length in enumerate(plain.lengths.tolist()):
        assert verified.tokens[row, :length].tolist() == plain.tokens[row, :length].tolist()
    assert max(runs) > 1, "no draft was ever accepted"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_requests_get_the_tokens_that_they_get_without_drafts(drafter: Drafter, seed: int) -> None:
    """Temperatures, seeds, penalties, biases, `min_tokens` and truncation are random, and so are limits."""
    check(112, seed, drafter)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is a Python function")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_give_the_tokens_that_the_oracle_gives_without_drafts() -> None:
    check(1, 9, adversarial, on_kernels=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.UNTRUNCATED, Mode.FULL])
def test_tokens_that_are_not_published_are_equal_and_write_no_table(mode: Mode, device: str) -> None:
    """Several candidates of some rows are rejected, so that every kernel writes some of the tokens."""
    case = make_case(6, 300)
    if mode is Mode.FULL:
        truncations(case, [0, 3], [0.3, 0.9], [0.0, 0.2])
    case = case.to(device)
    sizes = {"tile": 64, "segment": 32, "group": 8, "capacity": 32}
    tables, found, expected = copy_of(case.tables), torch.zeros_like(case.rows), torch.zeros_like(case.rows)
    case.sampler(**sizes).launch(mode, replace(case.batch(found), publish=False))
    assert torch.equal(tables.tokens, case.tokens) and torch.equal(tables.lengths, case.lengths)
    case.sampler(**sizes).launch(mode, case.batch(expected))
    assert torch.equal(found, expected)


def test_runs_follow_the_distribution_of_the_model() -> None:
    """Chi-squared of the first two tokens of 100,000 rows whose first draft is accepted for some of them."""
    rows, vocab = 100_000, 5
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(vocab, generator=generator)
    second = torch.randn(vocab, vocab, generator=generator)
    case = make_case(rows, vocab, 6, max_len=6)
    case.ints[:, SEED] = torch.randint(0, 2**62, (len(case.ints),), generator=generator)
    case.ints[1:, PROMPT_LEN], case.ints[1:, TOTAL_LEN], case.ints[1:, MIN_TOKENS] = 2, 6, 0
    case.ints[1:, TOP_K], case.lengths[1:] = 0, 2
    case.floats[:, [TEMPERATURE, TOP_P, REPETITION]], case.floats[:, [MIN_P, PRESENCE, FREQUENCY]] = 1.0, 0.0
    draft = torch.randint(0, vocab, (len(case.tokens),), generator=generator).int()
    case.tokens[:, 2] = draft
    queries = 2
    chosen = torch.arange(1, rows + 1, dtype=torch.int32)
    logits = torch.stack([first.expand(rows, vocab), second[draft[1 : rows + 1].long()]], 1).reshape(-1, vocab)
    sampled = torch.zeros(rows * queries, dtype=torch.int32)
    at = torch.tensor([1, 2]).int().repeat(rows)
    batch = SamplingBatch(logits, chosen.repeat_interleave(queries), at, sampled, needs=RANDOM, longest=6)
    # Segments of the usual size would be padding but for five tokens.
    sampled.copy_(sample(logits, gather(case.tables, batch), segment=8))
    pairs = sampled.view(rows, queries).long()
    accepted = pairs[:, 0] == draft[1 : rows + 1]
    assert_chi_squared(pairs[:, 0], first.softmax(0))
    for token in range(vocab):
        followed = pairs[accepted & (pairs[:, 0] == token)][:, 1]
        assert len(followed) > 1000
        assert_chi_squared(followed, second[token].softmax(0))
    counts, few = torch.zeros(2, 1000, dtype=torch.int32), chosen[:1000]
    given = few, queries, sampled[: 1000 * queries], torch.zeros_like(few)
    again = copy_of(case.tables)
    accept(again, *given, counts[0])
    accept_kernel(case.tables, *given, counts[1])
    assert torch.equal(again.tokens, case.tokens) and torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0] & 0xFF, 1 + accepted[:1000].int())


def assert_chi_squared(tokens: Tensor, probabilities: Tensor) -> None:
    """Assert that the statistic of four degrees of freedom is below its quantile of 1 in 100,000."""
    expected = probabilities * len(tokens)
    statistic = ((tokens.bincount(minlength=len(expected)) - expected) ** 2 / expected).sum()
    assert statistic < 28.5
