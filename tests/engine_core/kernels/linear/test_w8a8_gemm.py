"""W8A8 GEMMs for many rows, against their oracle."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.linear.quantized_plans import SCALE_ROWS
from tandem.engine_core.kernels.linear.w8a8_gemm import w8a8_gemm
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_matmul
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan
from tests.support.noted_reads import count_strays, noted_reads, with_room

PLAN = W8A8GemmPlan(32, 32, 1, 2, 4, group_m=2)
SPLIT = replace(PLAN, split=3, block_m=64)
KINDS = {
    "fp8 outputs": (torch.float8_e4m3fn, None, "row"),
    "fp8 static": (torch.float8_e4m3fn, None, "static"),
    "fp8 blocks": (torch.float8_e4m3fn, SCALE_ROWS, "group"),
    "int8 outputs": (torch.int8, None, "row"),
}
Case = tuple[QuantizedActivation, Tensor, Tensor, int | None]


def case_of(kind: str, rows: int, outputs: int, inputs: int, device: str, whole: bool = False) -> Case:
    dtype, scale_rows, inputs_are = KINDS[kind]
    generator = torch.Generator().manual_seed(rows + outputs)
    known = torch.full((1,), 0.01, device=device) if inputs_are == "static" else None
    to = ActivationFormat(dtype, 128 if inputs_are == "group" else None, known)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-1, 1, rows)[:, None]
    values = (torch.randn(outputs, inputs, generator=generator) * 40).clamp(-127, 127).to(device, dtype)
    shape = (outputs,) if scale_rows is None else (-(-outputs // SCALE_ROWS), inputs // 128)
    scales = ((torch.rand(shape, generator=generator) - 0.5) / 50).to(device)
    if whole:
        scales = scales[:: 128 // SCALE_ROWS].repeat_interleave(128 // SCALE_ROWS, 0)[: shape[0]]
    return quantize(x.to(device), to), values, scales.contiguous(), scale_rows


def space(device: str) -> tuple[Tensor, Tensor]:
    return torch.full((1 << 16,), 7.0, device=device), torch.zeros(64, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, SPLIT])))
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gemm_equals_its_oracle(kind: str, plan: W8A8GemmPlan, with_bias: bool, device: str) -> None:
    x, values, scales, scale_rows = case_of(kind, 69, 80, 512, device)
    bias = torch.randn(80, device=device) if with_bias else None
    partials, counters = space(device)
    found = w8a8_gemm(x, values, scales, bias, plan, partials, counters)
    torch.testing.assert_close(found, quantized_matmul(x, values, scales, bias, scale_rows), atol=1e-3, rtol=1e-4)
    assert not counters.any()


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_end_within_a_tile_have_their_own_scales(whole: bool, device: str) -> None:
    x, values, scales, scale_rows = case_of("fp8 blocks", 5, 304, 256, device, whole)
    found = w8a8_gemm(x, values, scales, None, PLAN, *space(device), whole_blocks=whole)
    torch.testing.assert_close(found, quantized_matmul(x, values, scales, None, scale_rows), atol=1e-3, rtol=1e-4)


def test_padding_changes_no_row(device: str) -> None:
    x, values, scales, _ = case_of("fp8 blocks", 5, 64, 256, device)
    expected = w8a8_gemm(x, values, scales, None, PLAN, *space(device))
    x.values[5:] = 448.0
    x.scales[5:] = float("nan")
    assert torch.equal(w8a8_gemm(x, values, scales, None, PLAN, *space(device)), expected)


def rows_with_room(x: QuantizedActivation) -> QuantizedActivation:
    """The same rows, with readable memory far past their end."""
    room = 64 * x.values.shape[1]
    return replace(x, values=with_room(x.values, room), scales=with_room(x.scales, room))


def strays_of(multiply: Callable[..., Tensor], kind: str, plan: W8A8GemmPlan) -> int:
    """Return the number of reads outside of the operands, whose last rows and outputs fill no tile."""
    x, values, scales, _ = case_of(kind, 5, 80, 512, "cpu")
    bias = with_room(torch.randn(80), 64)
    x, values, scales = rows_with_room(x), with_room(values, 64 * 512), with_room(scales, 64 * 512)
    partials, counters = space("cpu")
    with noted_reads() as reads:
        multiply(x, values, scales, bias, plan, partials, counters)
    return count_strays(reads, x.values[:5], x.scales[:5], values, scales, bias, partials)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter tells what is read")
@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, SPLIT])))
def test_nothing_but_the_operands_is_read(kind: str, plan: W8A8GemmPlan) -> None:
    assert strays_of(w8a8_gemm, kind, plan) == 0


def test_no_rows_give_an_empty_result_and_wrong_operands_are_refused(device: str) -> None:
    x, values, scales, _ = case_of("int8 outputs", 3, 64, 256, device)
    none = QuantizedActivation(x.values[:0], x.scales[:0], 0, x.dtype)
    assert w8a8_gemm(none, values, scales, None, PLAN, *space(device)).shape == (0, 64)
    with pytest.raises(AssertionError):
        w8a8_gemm(x, values[:, :128].contiguous(), scales, None, PLAN, *space(device))
    with pytest.raises(AssertionError, match="workspace"):
        w8a8_gemm(x, values, scales, None, replace(PLAN, split=2), torch.empty(1), torch.empty(1))
