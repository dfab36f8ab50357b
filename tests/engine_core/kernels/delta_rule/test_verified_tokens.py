"""Rows of recurrent layers that verify drafts: what is rejected leaves no trace, and kernels equal their oracles."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule import accepted
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, TokenRows, base_length
from tandem.engine_core.kernels.delta_rule.verified_tokens import verified_tokens
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.kernels.reference import delta_rule as reference
from tests.support.delta_rule_case import SMALL, DeltaRuleCase, Drafted

Fold = Callable[[DeltaRuleState, Tensor, Tensor, Tensor], None]
TOLERANCE = 2e-4
DRAFTS = 7
LENGTHS = [90, 90, 90]
STARTS = (15, 16, 40)
"""Tokens of each row's prompt: the row before a boundary of the ring, the one at it, and between two."""


class Rows:
    """Rows that have computed prompts, and go on by steps with and without drafts."""

    def __init__(self, case: DeltaRuleCase, fold: Fold) -> None:
        self.case = case
        self.fold = fold
        self.computed = list(STARTS)
        case.step([(row, 0, start) for row, start in enumerate(STARTS, 1)])

    def verify(self, given: list[tuple[int, int]], queries: int) -> Tensor:
        """Verify drafts in every row and accept those that are right; return the outputs of accepted tokens.

        given: number of drafts and of right ones of each row.
        """
        work: list[Drafted] = [
            (row, start, *drafts) for row, (start, drafts) in enumerate(zip(self.computed, given, strict=True), 1)
        ]
        outputs = self.case.verify(work, queries)
        counts = [1 + right for _, right in given]
        self.computed = [start + count for start, count in zip(self.computed, counts, strict=True)]
        self._accept(counts)
        return torch.cat([outputs[index * queries :][:count] for index, count in enumerate(counts)])

    def _accept(self, counts: list[int]) -> None:
        state, device = self.case.state, self.case.conv.device
        stacked = DeltaRuleState(*[tensor[None] for tensor in state.tensors])
        rows = torch.tensor([1, 0, 2, 3], dtype=torch.int32, device=device)
        lengths = torch.tensor([1, *[computed + 1 for computed in self.computed]], dtype=torch.int32, device=device)
        packed = [count | 5 << 8 for count in (counts[0], 0, *counts[1:])]
        self.fold(stacked, rows, lengths, torch.tensor(packed, dtype=torch.int32, device=device))

    def plain(self) -> Tensor:
        """Compute one token of each row."""
        work = [(row, start, 1) for row, start in enumerate(self.computed, 1)]
        self.computed = [start + 1 for start in self.computed]
        return self.case.step(work, len(work))

    def alone(self, counts: list[int]) -> Tensor:
        """Compute tokens of each row one by one; return the outputs row by row."""
        found = []
        for row, count in enumerate(counts, 1):
            for _ in range(count):
                found.append(self.case.step([(row, self.computed[row - 1], 1)], 1))
                self.computed[row - 1] += 1
        return torch.cat(found)


def kernels(device: str, max_drafts: int = DRAFTS, shape: DeltaRuleShape = SMALL) -> Rows:
    case = DeltaRuleCase(triton_kernels(False), LENGTHS, shape=shape, device=device, max_drafts=max_drafts)
    return Rows(case, accepted.fold_accepted)


def oracle(device: str, max_drafts: int = DRAFTS, shape: DeltaRuleShape = SMALL) -> Rows:
    case = DeltaRuleCase(torch_kernels(), LENGTHS, shape=shape, device=device, max_drafts=max_drafts)
    return Rows(case, reference.fold_accepted)


def check_memory(found: Rows, expected: Rows) -> None:
    """Compare all that later steps and checkpoints can read of the rows: their base, ring and inputs."""
    assert found.computed == expected.computed
    one, other = found.case.state, expected.case.state
    for row, computed in enumerate(found.computed, 1):
        where = torch.tensor([[row], [computed]], device=one.base.device)
        folded = [reference.fold(state, *where) for state in (one, other)]
        for mine, theirs in zip(*folded, strict=True):
            torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(one.base[row], other.base[row], atol=TOLERANCE, rtol=TOLERANCE)
        first = base_length(computed, one.ring) - SMALL.conv_width + 1
        kept = [
            state.columns[row, torch.arange(max(0, first), computed) % state.columns.shape[1]] for state in (one, other)
        ]
        assert torch.equal(*kept)


def patterns(rng: random.Random, queries: int) -> list[tuple[int, int]]:
    """Draw drafts of each row, and how many of them are right."""
    drafts = [rng.choice([0, queries - 1, rng.randrange(queries)]) for _ in LENGTHS]
    return [(count, rng.choice([0, count, rng.randint(0, count)])) for count in drafts]


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_equals_the_recurrence(seed: int) -> None:
    """Random drafts, right and wrong, between plain steps, from every offset in the ring; the other has no drafts."""
    rng, found, expected = random.Random(seed), oracle("cpu"), oracle("cpu", 0)
    while max(found.computed) < 80:
        queries = rng.randint(2, 1 + DRAFTS)
        given = patterns(rng, queries)
        outputs = found.verify(given, queries)
        torch.testing.assert_close(
            outputs, expected.alone([1 + right for _, right in given]), atol=TOLERANCE, rtol=TOLERANCE
        )
        check_memory(found, expected)
        if rng.random() < 0.4:
            torch.testing.assert_close(found.plain(), expected.plain(), atol=TOLERANCE, rtol=TOLERANCE)
            check_memory(found, expected)


@pytest.mark.parametrize("seed", range(2))
def test_kernels_equal_the_oracle(seed: int, device: str) -> None:
    rng, found, expected = random.Random(seed), kernels(device), oracle(device)
    for _ in range(3):
        queries = rng.randint(2, 1 + DRAFTS)
        given = patterns(rng, queries)
        outputs = [rows.verify(given, queries) for rows in (found, expected)]
        torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=TOLERANCE)
        check_memory(found, expected)
        outputs = [rows.plain() for rows in (found, expected)]
        torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=TOLERANCE)
    chunks = [rows.case.step([(2, rows.computed[1], 9)]) for rows in (found, expected)]
    torch.testing.assert_close(*chunks, atol=TOLERANCE, rtol=TOLERANCE)


def test_rejected_drafts_change_no_bit(device: str) -> None:
    """Before, at and after a boundary of the ring; drafts of the second row are NaN."""
    found, expected = kernels(device), kernels(device)
    for _ in range(3):
        outputs = found.verify([(5, 0)] * 3, 6), expected.verify([(0, 0)] * 3, 6)
        assert torch.equal(*outputs)
    states = [rows.case.state for rows in (found, expected)]
    assert torch.equal(states[0].base[1:], states[1].base[1:])


@pytest.mark.parametrize("shape", [
    DeltaRuleShape(key_heads=1, value_heads=5, key_dim=32, value_dim=128, conv_width=2),
    DeltaRuleShape(key_heads=3, value_heads=3, key_dim=16, value_dim=16, conv_width=6),
])  # fmt: skip
def test_other_shapes_equal_the_oracle(shape: DeltaRuleShape, device: str) -> None:
    found, expected = (rows(device, 3, shape) for rows in (kernels, oracle))
    for given in ([(3, 3), (2, 1), (3, 0)], [(0, 0), (3, 3), (1, 1)]):
        outputs = [rows.verify(given, 4) for rows in (found, expected)]
        torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found.case.state.base[1:], expected.case.state.base[1:], atol=TOLERANCE, rtol=TOLERANCE)


def test_padding_leaves_every_memory_as_it_is(device: str) -> None:
    """A row without a live token, such as one that has all its tokens, is padding as well."""
    rows = kernels(device)
    case, before = rows.case, [tensor.clone() for tensor in rows.case.tensors]
    zeros = torch.zeros(16, dtype=torch.int32, device=device)
    x = torch.full((16, case.inputs[0].shape[1]), torch.nan, device=device)
    out = case._run(x, TokenRows(zeros, zeros + 32, queries=8))
    assert out.eq(0).all()
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(case.tensors, before, strict=True))


def test_more_drafts_than_the_ring_has_room_for_are_refused(device: str) -> None:
    case = kernels(device, 3).case
    tokens = TokenRows(*torch.zeros(2, 5, dtype=torch.int32, device=device).unbind(), queries=5)
    x = torch.zeros(5, 4, 32, device=device)
    with pytest.raises(ValueError, match="5 tokens a row"):
        verified_tokens(x, x, x, case.a_log, case.dt_bias, SMALL, case.state, tokens)
