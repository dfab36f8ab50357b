"""Sampling draws: the right distribution, and tokens independent of the rest of the batch."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import (
    SEGMENT,
    Bias,
    Draw,
    Penalties,
    SamplingRows,
    Truncation,
    sample,
    truncate,
)

LOW = -torch.inf


def draws(temperature: Tensor, seed: int = 1, choice: int = 0) -> Draw:
    """Rows that differ by position only."""
    count = len(temperature)
    same = torch.zeros(count, dtype=torch.int64)
    return Draw(temperature, same + seed, same + choice, torch.arange(count))


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert not counts[expected == 0].any()
    used = expected > 0
    return ((counts[used] - expected[used]) ** 2 / expected[used]).sum().item()


def many(
    logits: Tensor, count: int, temperature: float = 1.0, truncation: Truncation | None = None, segment: int = SEGMENT
) -> Tensor:
    rows = SamplingRows(draws(torch.full((count,), temperature), seed=2**40 + 5), truncation)
    return sample(logits.expand(count, -1), rows, segment=segment)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, LOW, 1.5, 0.2, -0.7])
    tokens = many(logits, 12000, temperature)
    # 7 degrees of freedom: 29.9 is passed by chance once in 10,000.
    assert chi_square(tokens, (logits / temperature).softmax(0)) < 29.9


def test_draws_from_a_large_vocabulary_follow_the_softmax_in_groups() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(901, generator=generator) * 2
    tokens = many(logits, 5000, segment=32)
    groups = torch.arange(901) % 25
    expected = torch.zeros(25).scatter_add(0, groups, logits.softmax(0))
    # 24 degrees of freedom: 58.6 once in 10,000.
    assert chi_square(groups[tokens], expected) < 58.6


def test_draws_follow_what_truncation_leaves() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    count = 10000
    all_rows = torch.ones(count)
    truncation = Truncation((all_rows * 4).long(), all_rows * 0.9, all_rows * 0.2)
    # Top-k leaves 4, of which the first 3 reach 0.9; all of them pass min-p.
    expected = torch.cat((logits[:3].softmax(0), torch.zeros(3)))
    assert chi_square(many(logits, count, 1.0, truncation), expected) < 18.4


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 0.9, 0.0),
        (0, 0.02, 0.0),
        (0, 0.4, 0.0),
        (7, 1.0, 0.0),
        (9, 0.6, 0.0),
        (0, 1.0, 0.3),
        (0, 0.5, 0.2),
        (6, 0.8, 0.1),
    ],
)
def test_draws_from_several_segments_follow_every_truncation(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Flat logits with ties at every rank, so that most rows need resampling."""
    logits = (torch.randn(40, generator=torch.Generator().manual_seed(8)) * 1.2).mul(4).round() / 4
    count, ones = 20000, torch.ones(20000)
    truncation = Truncation((ones * top_k).long(), ones * top_p, ones * min_p)
    rows = SamplingRows(draws(ones * temperature, seed=2**50 + 7), truncation)
    tokens = sample(logits.expand(count, -1), rows, segment=8)
    exact = logits.double()[None] / temperature
    one = truncation.of(torch.zeros(1, dtype=torch.int64))
    expected = truncate(exact, one.top_k, one.top_p.double(), one.min_p.double()).softmax(-1)[0]
    kept = int((expected > 0).sum())
    # The mean of a chi-square is its degrees of freedom, and their double is the variance.
    assert chi_square(tokens, expected) < kept - 1 + 4.5 * (2 * kept) ** 0.5 + 3


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_draws_of_neighbours_are_independent(varied: str) -> None:
    """Consecutive seeds, choices and positions, under truncation that resamples."""
    count, ones = 20000, torch.ones(20000)
    key = {name: torch.full((count,), 7, dtype=torch.int64) for name in ("seed", "choice", "position")}
    key[varied] = torch.arange(count)
    logits = torch.tensor([0.5, -0.2, 0.9, 0.0, 0.3, 0.7, -0.4, 0.1])
    rows = SamplingRows(Draw(ones, **key), Truncation(ones.long() * 0, ones * 0.5, ones * 0))
    tokens = sample(logits.expand(count, -1), rows, segment=4)
    share = truncate(logits[None], torch.tensor([0]), torch.tensor([0.5]), torch.tensor([0.0])).softmax(-1)[0]
    assert (share > 0).sum() == 3
    pairs = tokens[::2] * 8 + tokens[1::2]
    # 8 degrees of freedom: 31.8 is passed by chance once in 10,000.
    assert chi_square(pairs, (share[:, None] * share).flatten()) < 31.8


def test_a_small_change_of_logits_rarely_changes_a_token() -> None:
    logits = torch.randn(2000, 300)
    near = logits + torch.randn(2000, 300) * 1e-3
    ones = torch.ones(2000)
    rows = SamplingRows(draws(ones), Truncation(ones.long() * 0, ones * 0.95, ones * 0))
    assert (sample(logits, rows, segment=32) != sample(near, rows, segment=32)).float().mean() < 0.01


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [3.0, 3.0, 3.0], [-1.0, -2.0, 7.0]])
    assert sample(logits, SamplingRows()).tolist() == [1, 0, 2]
    assert sample(logits, SamplingRows(draws(torch.zeros(3)))).tolist() == [1, 0, 2]


def test_greedy_rows_among_others_take_their_argmax() -> None:
    logits = torch.randn(64, 50)
    temperature = torch.ones(64)
    temperature[::2] = 0
    tokens = sample(logits, SamplingRows(draws(temperature)))
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).sum() > 10


@pytest.mark.parametrize("temperature", [1e-2, 1e-30, 1e-44])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = torch.randn(100, 20).sort().values * 50
    assert (sample(logits, SamplingRows(draws(torch.full((100,), temperature)))) == 19).float().mean() > 0.95


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, 30).round()
    one = torch.ones(50)
    rows = SamplingRows(draws(one), Truncation(one.long(), one, one * 0))
    assert torch.equal(sample(logits, rows), logits.argmax(-1))


def full_rows(count: int, vocab: int) -> tuple[Tensor, SamplingRows, Tensor]:
    """Logits, rows that use every parameter group, and a mask."""
    generator = torch.Generator().manual_seed(9)

    def number(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    def integer(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (count, *shape), generator=generator)

    temperature = number(0.3, 1.5)
    temperature[::5] = 0
    prompt = integer(10)
    rows = SamplingRows(
        Draw(temperature, integer(2**62), integer(4), integer(4000)),
        Truncation(integer(30), number(0.3, 1.0), number(0, 0.1)),
        Penalties(number(0.8, 1.5), number(-1, 1), number(-1, 1), integer(vocab, 24), prompt, prompt + integer(14)),
        Bias(integer(vocab, 3) - 1, torch.randn(count, 3, generator=generator)),
        integer(vocab, 2) - 1,
    )
    allowed = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator).to(torch.int32)
    return torch.randn(count, vocab, generator=generator) * 3, rows, allowed


def pick(group: object, index: Tensor) -> object:
    """The same group of tensors for some of its rows."""
    values = (getattr(group, field.name) for field in fields(group))  # type: ignore[arg-type]
    parts = [value[index] if isinstance(value, Tensor) else pick(value, index) for value in values]
    return type(group)(*parts)


def test_a_token_does_not_depend_on_the_batch() -> None:
    logits, rows, allowed = full_rows(40, 101)
    together = sample(logits, rows, allowed)
    assert len(set(together.tolist())) > 15
    order = torch.randperm(40)
    for index in (*torch.arange(40).split(1), order, order[:7]):
        part = pick(rows, index)
        assert isinstance(part, SamplingRows)
        assert torch.equal(sample(logits[index], part, allowed[index]), together[index])


def test_neutral_groups_change_nothing() -> None:
    logits = torch.randn(30, 70)
    ones, zeros = torch.ones(30), torch.zeros(30)
    history = torch.randint(0, 70, (30, 12))
    draw = draws(ones)
    neutral = SamplingRows(
        draw,
        Truncation(zeros.long(), ones, zeros),
        Penalties(ones, zeros, zeros, history, zeros.long() + 4, zeros.long() + 9),
        Bias(torch.full((30, 2), -1), torch.ones(30, 2)),
        torch.full((30, 2), -1),
    )
    everything = torch.full((30, 3), -1, dtype=torch.int32)
    assert torch.equal(sample(logits, neutral, everything), sample(logits, SamplingRows(draw)))


def test_bias_applies_before_penalties_and_both_before_greedy() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.8]])
    one = torch.ones(1)
    bias = Bias(torch.tensor([[1]]), torch.tensor([[3.0]]))
    history, lengths = torch.tensor([[1, 0]]), torch.tensor([1])
    assert sample(logits, SamplingRows(bias=bias)).tolist() == [1]
    # Divided by 4 after the bias, token 1 has 0.75; divided before it, it would have 3.
    halved = Penalties(one * 4, one * 0, one * 0, history, lengths, lengths)
    assert sample(logits, SamplingRows(bias=bias, penalties=halved)).tolist() == [0]


def test_suppressed_tokens_never_come() -> None:
    logits = torch.zeros(2000, 4)
    logits[:, 2] = 10
    suppressed = torch.full((2000, 2), -1)
    suppressed[:1000] = torch.tensor([2, 0])
    tokens = sample(logits, SamplingRows(draws(torch.ones(2000)), suppressed=suppressed))
    assert set(tokens[:1000].tolist()) == {1, 3}
    assert (tokens[1000:] == 2).float().mean() > 0.99
    assert sample(logits, SamplingRows(suppressed=suppressed))[:1000].unique().tolist() == [1]


def test_masked_tokens_never_come() -> None:
    logits = torch.randn(1000, 40)
    allowed = torch.tensor([[1 << 3 | 1 << 17, 1 << 4]], dtype=torch.int32).expand(1000, 2)
    assert set(sample(logits, SamplingRows(draws(torch.ones(1000))), allowed).tolist()) == {3, 17, 36}
    assert set(sample(logits, SamplingRows(), allowed).tolist()) == {3, 17, 36}


@pytest.mark.parametrize("value", [LOW, torch.nan, torch.inf])
def test_a_row_without_a_distribution_yields_no_token(value: float) -> None:
    logits = torch.randn(4, 11)
    logits[1:3] = value
    ones = torch.ones(4)
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0])
    for truncation in (None, Truncation(ones.long() * 3, ones * 0.9, ones * 0.1)):
        rows = SamplingRows(draws(temperature), truncation)
        tokens = sample(logits, rows)
        assert tokens[1:3].tolist() == [-1, -1]
        logits[1:3] = 0
        assert torch.equal(sample(logits, rows)[[0, 3]], tokens[[0, 3]])
        logits[1:3] = value
    assert sample(logits, SamplingRows())[1:3].tolist() == [-1, -1]


def test_one_nan_or_infinite_logit_is_enough_to_yield_no_token() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0], [0.0, torch.inf, 5.0], [LOW, 1.0, LOW]])
    assert sample(logits, SamplingRows()).tolist() == [-1, -1, 1]
    assert set(many(logits[0], 50).tolist()) == {-1}
    allowed = torch.tensor([[0b110], [0b001], [0b010]], dtype=torch.int32)
    suppressed = torch.tensor([[0], [1], [-1]])
    assert sample(logits, SamplingRows(suppressed=suppressed), allowed).tolist() == [-1, -1, 1]


def test_a_row_to_which_mask_or_suppression_leave_nothing_yields_id_0() -> None:
    logits = torch.zeros(2, 3)
    allowed = torch.tensor([[0], [0b111]], dtype=torch.int32)
    suppressed = torch.tensor([[-1, -1, -1], [0, 1, 2]])
    assert sample(logits, SamplingRows(suppressed=suppressed), allowed).tolist() == [0, 0]


def test_nothing_is_modified() -> None:
    logits, rows, allowed = full_rows(12, 64)
    copy = logits.clone()
    sample(logits, rows, allowed)
    assert torch.equal(logits, copy)
