"""Log-probabilities of the distributions that tokens are drawn from."""

import math

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import process_logits, truncate
from tandem.engine_core.sampling.processed_logprobs import SLICE, ProcessedLogprobs
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES
from tandem.engine_core.sampling.scorer import TorchScorer
from tests.support.sampling_case import (
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Case,
    ask_everything,
    make_case,
    truncations,
)

EVERYTHING = RANDOM | TRUNCATES | PENALIZES | BIASED | SUPPRESSES
VOCAB, TOP = 70, 5


def expected(case: Case, index: int, allowed: list[int] | None = None) -> list[float]:
    """Compute the log-probabilities of one row, token by token in Python."""
    row, position = int(case.rows[index]), int(case.positions[index])
    ints, floats = case.ints[row].tolist(), case.floats[row].tolist()
    logits = case.logits[index].double().tolist()
    for token, bits in zip(case.bias[0, row].tolist(), case.bias[1, row], strict=True):
        if token >= 0:
            logits[token] += float(bits.view(torch.float32))
    history = case.tokens[row, : position + 1].tolist()
    output = history[ints[PROMPT_LEN] :]
    for token in set(history):
        factor = floats[REPETITION]
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= output.count(token) * floats[FREQUENCY] + floats[PRESENCE]
    if position + 1 - ints[PROMPT_LEN] < ints[MIN_TOKENS]:
        for token in case.suppressed[row].tolist():
            if token >= 0:
                logits[token] = -math.inf
    if allowed is not None:
        logits = [value if token in allowed else -math.inf for token, value in enumerate(logits)]
    if floats[TEMPERATURE] > 0:
        scaled = torch.tensor([[value / floats[TEMPERATURE] for value in logits]])
        limits = (torch.tensor([ints[TOP_K]]), torch.tensor([floats[TOP_P]]), torch.tensor([floats[MIN_P]]))
        logits = truncate(scaled, *limits)[0].double().tolist()
    total = math.log(sum(math.exp(value - max(logits)) for value in logits)) + max(logits)
    return [value - total for value in logits]


def records(case: Case, needs: int, index: list[int], allowed: Tensor | None = None) -> Tensor:
    sampled = torch.arange(len(case.rows)).int() % VOCAB
    found = torch.full((len(case.rows), 1 + 2 * TOP), -77, dtype=torch.int32)
    batch = case.batch(sampled, needs, allowed)
    ProcessedLogprobs(case.tables, TorchScorer()).run(batch, TOP, found, torch.tensor(index, dtype=torch.int32))
    return found


def masks(count: int, allowed: list[int]) -> Tensor:
    words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(math.ceil(VOCAB / 32))]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor([signed] * count, dtype=torch.int32)


@pytest.mark.parametrize("masked", [False, True])
def test_records_equal_those_computed_token_by_token(masked: bool) -> None:
    case = make_case(SLICE + 4, VOCAB)
    ask_everything(case)
    truncations(case, [0, 3, 12], [1.0, 0.6], [0.0, 0.1, 0.0, 0.0])
    allowed = [1, 5, 33, 40, 41, 64, 69] if masked else None
    wanted = [index for index in range(len(case.rows)) if index % 3 != 1]
    words = None if allowed is None else masks(len(case.rows), allowed)
    found = records(case, EVERYTHING, wanted, words)
    for index in range(len(case.rows)):
        if index not in wanted:
            assert (found[index] == -77).all(), "a record nobody asked for"
            continue
        row = expected(case, index, allowed)
        values = found[index, : 1 + TOP].view(torch.float32).tolist()
        assert values[0] == pytest.approx(row[index % VOCAB], abs=1e-4)
        best = sorted(row, reverse=True)[:TOP]
        assert values[1:] == pytest.approx(best, abs=1e-4)
        for token, value in zip(found[index, 1 + TOP :].tolist(), values[1:], strict=True):
            assert row[token] == pytest.approx(value, abs=1e-4)


def test_greedy_rows_are_not_divided_or_truncated() -> None:
    case = make_case(3, VOCAB)
    case.floats[:, TEMPERATURE] = 0
    truncations(case, [2], [0.3], [0.5])
    logits = process_logits(case.logits, case.sampling_rows(full=True), None)
    torch.testing.assert_close(logits.log_softmax(-1), case.logits.log_softmax(-1))


def test_a_tiny_temperature_leaves_all_mass_to_the_largest_logit() -> None:
    case = make_case(2, VOCAB)
    case.floats[:, TEMPERATURE] = 1e-38
    logprobs = process_logits(case.logits, case.sampling_rows(full=False), None).log_softmax(-1)
    assert logprobs.amax(-1).tolist() == [0.0, 0.0]
    assert torch.equal(logprobs.argmax(-1), case.logits.argmax(-1))


def test_a_mask_that_allows_nothing_leaves_no_probability() -> None:
    case = make_case(2, VOCAB)
    found = records(case, RANDOM, [0, 1], masks(2, []))
    assert (found[:, : 1 + TOP].contiguous().view(torch.float32) == -math.inf).all()
