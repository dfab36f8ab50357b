"""The kernels of recurrent layers against their oracles, in float32."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from tandem.engine_core.kernels.delta_rule.gates import sigmoid_gate
from tandem.engine_core.kernels.delta_rule.pieces import find_pieces
from tandem.engine_core.kernels.delta_rule.state import PIECE, TokenRows, max_pieces
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.kernels.reference import delta_rule as reference
from tests.support.delta_rule_case import SMALL, DeltaRuleCase, Work

TOLERANCE = 2e-4
"""Of outputs up to about 10."""
CHUNKS = [(0, 2), (0, 66), (1, 14), (1, 15), (15, 2), (16, 49), (17, 14), (31, 66), (50, 14), (63, 2), (64, 14)]
"""Starts and lengths of chunks: across boundaries of the ring and of pieces, up to them, and within one."""


def pair(lengths: Sequence[int], device: str, **fields: object) -> tuple[DeltaRuleCase, DeltaRuleCase]:
    """The same inputs for kernels and oracle."""
    kernels = triton_kernels(False)
    return (
        DeltaRuleCase(kernels, lengths, device=device, **fields),  # type: ignore[arg-type]
        DeltaRuleCase(torch_kernels(), lengths, device=device, **fields),  # type: ignore[arg-type]
    )


def check(
    found: DeltaRuleCase, expected: DeltaRuleCase, work: Sequence[Work], num_single: int, padding: int = 0
) -> None:
    outputs = [case.step(work, num_single, padding) for case in (found, expected)]
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=TOLERANCE)
    rows = [row for row, _, _ in work]
    for row, start, length in work:
        end = start + length
        where = torch.tensor([[row], [end]], device=found.conv.device)
        folded = [reference.fold(case.state, *where)[0] for case in (found, expected)]
        torch.testing.assert_close(*folded, atol=TOLERANCE, rtol=TOLERANCE)
    bases = [case.state.base[rows] for case in (found, expected)]
    torch.testing.assert_close(*bases, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found.state.columns[1:], expected.state.columns[1:])


@pytest.mark.parametrize("ring", [1, 4, 16])
def test_single_tokens_equal_the_oracle(ring: int, device: str) -> None:
    """Rows at different positions cross the ring's boundaries at different steps; one begins."""
    found, expected = pair([24, 24, 24], device, ring=ring)
    check(found, expected, [(1, 0, 14), (2, 0, 16)], 0)
    for step in range(4):
        check(found, expected, [(1, 14 + step, 1), (2, 16 + step, 1), (3, step, 1)], 3, padding=step % 2)


@pytest.mark.parametrize(("start", "length"), CHUNKS)
def test_chunks_equal_the_oracle(start: int, length: int, device: str) -> None:
    found, expected = pair([start + length + 2], device, seed=start + length)
    if start:
        check(found, expected, [(1, 0, start)], 0)
    check(found, expected, [(1, start, length)], 0)
    for position in range(2):
        check(found, expected, [(1, start + length + position, 1)], 1)


def test_mixed_steps_equal_the_oracle(device: str) -> None:
    """Single tokens, prompts shorter than the convolution, chunks, padding between and behind them."""
    found, expected = pair([90, 90, 90, 90, 90], device)
    steps: list[tuple[list[Work], int]] = [
        ([(1, 0, 1), (2, 0, 2), (3, 0, 3)], 1),
        ([(1, 1, 1), (2, 2, 1), (5, 0, 70), (3, 3, 1), (4, 0, 17)], 2),
        ([(2, 3, 1), (3, 4, 1), (4, 17, 1), (1, 2, 40), (5, 70, 5)], 3),
        ([(3, 0, 5), (1, 0, 1)], 0),
    ]
    for work, num_single in steps:
        check(found, expected, work, num_single, padding=3)


@pytest.mark.parametrize("shape", [
    structs.replace(SMALL, value_heads=2, key_dim=32, value_dim=16, conv_width=2),
    structs.replace(SMALL, value_heads=6, value_dim=16, conv_width=6),
    structs.replace(SMALL, key_heads=1, value_heads=1, key_dim=128, value_dim=128),
])  # fmt: skip
def test_other_shapes_equal_the_oracle(shape: object, device: str) -> None:
    found, expected = pair([80, 80], device, shape=shape)
    check(found, expected, [(2, 0, 1), (1, 0, 20)], 1)
    check(found, expected, [(2, 1, 1), (1, 20, 50)], 1)


def test_equal_keys_are_solved_exactly(device: str) -> None:
    """Powers of the system of a repeated token would grow to 10^18 and cancel."""
    cases = pair([64], device)
    for case in cases:
        case.inputs[0][:] = case.inputs[0][:1]
        case.inputs[0][:, -2 * SMALL.value_heads : -SMALL.value_heads] = 20.0
        case.a_log.fill_(-30.0)
    check(*cases, [(1, 0, 64)], 0)


def test_a_row_at_position_0_ignores_what_its_memory_holds(device: str) -> None:
    found, _ = pair([18], device)
    used = found.step([(1, 0, 18)])
    for tensor in found.tensors:
        tensor.fill_(torch.nan)
    assert torch.equal(found.step([(1, 0, 18)]), used)
    assert not found.step([(1, 0, 1)], 1).isnan().any()


def test_rows_do_not_depend_on_their_batch(device: str) -> None:
    found, alone = pair([20, 20, 20], device)[0], pair([20, 20, 20], device)[0]
    found.step([(1, 0, 3), (2, 0, 18), (3, 0, 1)])
    alone.step([(2, 0, 18)])
    assert torch.equal(found.state.base[2], alone.state.base[2])
    together = found.step([(3, 1, 1), (2, 18, 1), (1, 3, 1)], 3)
    assert torch.equal(together[1:2], alone.step([(2, 18, 1)], 1))


def test_the_memory_of_the_padding_row_is_not_touched(device: str) -> None:
    found, _ = pair([20], device)
    before = [tensor[0].clone() for tensor in found.tensors]
    out = found.step([(1, 0, 1)], 1, padding=3)
    assert out[1:].eq(0).all()
    out = found.step([(1, 1, 10)], 0, padding=3)
    assert out[:3].eq(0).all()
    assert out[13:].eq(0).all()
    assert all(torch.equal(tensor[0], kept) for tensor, kept in zip(found.tensors, before, strict=True))


@pytest.mark.parametrize("first", [0, 2])
def test_pieces_are_cut_at_multiples_of_64(first: int, device: str) -> None:
    spans = [(3, 60, 10), (0, 0, 4), (1, 0, 64), (2, 64, 1), (5, 127, 66), (0, 0, 1), (0, 0, 1)]
    rows = [4, 6][:first] + [row for row, _, length in spans for _ in range(length)]
    positions = [9, 9][:first] + [start + step for _, start, length in spans for step in range(length)]
    tokens = TokenRows(
        torch.tensor(rows, dtype=torch.int32, device=device), torch.tensor(positions, device=device), first, 6
    )
    found = find_pieces(tokens)
    assert found is not None
    assert found.counts.tolist() == [7, 4]
    cuts = [(0, 4), (4, 10), (14, 78), (78, 79), (79, 80), (80, 144), (144, 145)]
    assert found.pieces[:7].tolist() == [[begin + first, end + first] for begin, end in cuts]
    assert found.spans[:4].tolist() == [[0, 2], [2, 3], [3, 4], [4, 7]]
    assert find_pieces(replace(tokens, num_single=len(rows))) is None


def test_gates_of_attention_equal_the_oracle(device: str) -> None:
    heads = torch.randn(3, 8, 32, device=device)
    x, gate = torch.randn(3, 96, device=device), heads[:, 1:6:2]
    torch.testing.assert_close(sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate))


@pytest.mark.parametrize("oracle", [False, True])
def test_a_chunk_equals_its_tokens_one_by_one(oracle: bool, device: str) -> None:
    """Outputs and state, from the middle of the ring over a boundary of pieces."""
    chunk, steps = (pair([72], device)[oracle] for _ in range(2))
    for case in (chunk, steps):
        case.step([(1, 0, 54)])
    found = chunk.step([(1, 54, 18)])
    expected = torch.cat([steps.step([(1, 54 + step, 1)], 1) for step in range(18)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(chunk.state.base[1], steps.state.base[1], atol=TOLERANCE, rtol=TOLERANCE)


def test_the_largest_number_of_pieces_is_exact() -> None:
    """A span of L tokens has at most 1 + ceil((L - 1) / 64) pieces, if it begins before a boundary."""
    most = [0] * 200
    for spans in range(1, 4):
        more = [
            max((most[tokens - length] + 1 + -(-(length - 1) // PIECE) for length in range(1, tokens + 1)), default=0)
            for tokens in range(200)
        ]
        most = [max(counts) for counts in zip(most, more, strict=True)]
        assert most == [max_pieces(tokens, spans) for tokens in range(200)]
