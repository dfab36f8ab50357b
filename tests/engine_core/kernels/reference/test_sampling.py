"""Logit processing, against the same rules in plain Python, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.kernels.reference.sampling import add_bias, apply_bitmask, penalize, suppress, truncate


def naive_truncate(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Kept ids, ranked by logit and then id."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    weights = [math.exp(logits[i] - logits[ranked[0]]) for i in ranked]
    total = sum(weights)
    kept, mass = [], 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if kept and top_p < 1 and mass >= top_p:
            break
        kept.append(token)
        mass += weight / total
    best = logits[ranked[0]]
    return {token for token in kept if token == ranked[0] or math.exp(logits[token] - best) >= min_p}


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(-8, 8), min_size=12, max_size=12),
            st.integers(0, 14),
            st.sampled_from([0.0, 0.1, 0.33, 0.61, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.01, 0.07, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_truncate_equals_naive(rows: list[tuple[list[int], int, float, float]]) -> None:
    # Thirds and sevenths keep sums and ratios away from the thresholds; integers give ties.
    logits = [[value / 2.1 for value in row[0]] for row in rows]
    top_k, top_p, min_p = (torch.tensor([row[i] for row in rows]) for i in (1, 2, 3))
    before = torch.tensor(logits)
    found = truncate(before, top_k, top_p, min_p)
    assert torch.equal(before, torch.tensor(logits))
    for row, (_, k, p, m) in enumerate(rows):
        kept = set(found[row].isfinite().nonzero().flatten().tolist())
        assert kept == naive_truncate(logits[row], k, p, m)
        assert torch.equal(found[row][sorted(kept)], before[row][sorted(kept)])


def test_ties_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    off = torch.zeros(1)
    assert truncate(logits, torch.tensor([2]), off + 1, off).isfinite().tolist() == [[False, True, True, False, False]]
    nucleus = truncate(torch.zeros(1, 4), torch.tensor([0]), off + 0.5, off)
    assert nucleus.isfinite().tolist() == [[True, True, False, False]]


def test_neutral_values_keep_everything_in_a_large_flat_vocabulary() -> None:
    logits = torch.randn(2, 50000) * 0.01
    off = torch.zeros(2)
    assert torch.equal(truncate(logits, off.long(), off + 1, off), logits)


def test_tokens_already_forbidden_stay_so() -> None:
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0]])
    for k, p, m in ((3, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.0), (4, 0.9999, 0.1)):
        kept = truncate(logits, torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        assert torch.equal(kept, logits)


def naive_penalize(
    logits: list[float], history: list[int], prompt: int, total: int, penalties: tuple[float, float, float]
) -> list[float]:
    repetition, presence, frequency = penalties
    result = list(logits)
    for token in set(history[:total]):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    output = history[prompt:total]
    for token in set(output):
        result[token] -= presence + frequency * output.count(token)
    return result


@pytest.mark.parametrize("seed", range(5))
def test_penalize_equals_naive(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, vocab, length = 6, 20, 15
    logits = torch.randn(rows, vocab, generator=generator) * 4
    history = torch.randint(0, vocab, (rows, length), generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 8, (rows,), generator=generator)
    total = prompt + torch.randint(0, 8, (rows,), generator=generator)
    history[torch.arange(length) >= total[:, None]] = 2**31 - 1
    penalties = [
        (1.0, 0.0, 0.0),
        (1.3, 0.0, 0.0),
        (1.0, 0.7, 0.0),
        (1.0, 0.0, 0.4),
        (0.8, -1.5, 0.2),
        (1.5, 2.0, -0.3),
    ]
    repetition, presence, frequency = torch.tensor(penalties).unbind(1)
    found = penalize(logits, history, prompt, total, repetition, presence, frequency)
    for row in range(rows):
        expected = naive_penalize(
            logits[row].tolist(), history[row].tolist(), int(prompt[row]), int(total[row]), penalties[row]
        )
        torch.testing.assert_close(found[row], torch.tensor(expected), atol=1e-5, rtol=1e-6)
    assert torch.equal(found[0], logits[0])


def test_bias_adds_and_unused_entries_do_nothing() -> None:
    logits = torch.zeros(2, 5)
    ids = torch.tensor([[0, 3, -1], [-1, -1, -1]])
    values = torch.tensor([[1.5, -100.0, 9.0], [9.0, 9.0, 9.0]])
    assert add_bias(logits, ids, values).tolist() == [[1.5, 0, 0, -100.0, 0], [0.0] * 5]


def test_suppress_unused_entries_do_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    found = suppress(logits, torch.tensor([[0, -1], [-1, -1], [2, 0]]))
    low = -torch.inf
    assert found.tolist() == [[low, 2.0, 3.0], [4.0, 5.0, 6.0], [low, 8.0, low]]


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_bitmask_forbids_the_ids_whose_bit_is_unset(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    allowed = torch.randint(0, 2, (3, vocab), generator=generator)
    words = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token] << (token % 32)
    packed = torch.from_numpy(words.numpy().astype("uint32").view("int32"))
    found = apply_bitmask(torch.zeros(3, vocab), packed)
    assert torch.equal(found == 0, allowed == 1)
    assert torch.equal(found == -torch.inf, allowed == 0)
