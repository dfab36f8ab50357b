"""Matmuls with 8-bit weights against dequantized weights, in float32."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation, rms_norm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tests.support.quantized_matmuls import assert_product

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

KINDS = ("int8", "fp8", "fp8_bits")
SCALES = ("rows", "blocks")
CASES = list(product(KINDS, SCALES))
EPS = 1e-5


def weights(kind: str, scales: str, outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Stored weights, their scales, and the dequantized weights."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    if kind == "int8":
        stored = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        numbers = stored.float()
    else:
        # Out of range, torch 2.11 returns NaN.
        fp8 = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored, numbers = (fp8 if kind == "fp8" else fp8.view(torch.uint8)), fp8.float()
    if scales == "rows":
        scale = (torch.rand(outputs, generator=generator) - 0.5) / 50
        numbers = numbers * scale[:, None]
    else:
        scale = (torch.rand(-(-outputs // 16), -(-inputs // 128), generator=generator) - 0.5) / 50
        spread = scale.repeat_interleave(16, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        numbers = numbers * spread
    return stored.to(device), scale.to(device), numbers.to(device)


def vectors(rows: int, inputs: int, device: str) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs)).to(device)


@pytest.mark.parametrize(("kind", "scales"), CASES)
@pytest.mark.parametrize(("outputs", "inputs", "plan"), [(13, 256, GemvPlan(8, 256)), (133, 384, GemvPlan(4, 64))])
def test_gemv_equals_the_library(
    kind: str, scales: str, outputs: int, inputs: int, plan: GemvPlan, device: str
) -> None:
    stored, scale, numbers = weights(kind, scales, outputs, inputs, device)
    x, bias = vectors(1, inputs, device), torch.ones(outputs, device=device)
    y, stream = quantized_gemv(x, stored, scale, None, bias, plan)
    assert_product(y, x, numbers, bias)
    assert stream is x


@pytest.mark.parametrize(("kind", "scales"), CASES)
def test_fused_norm_and_gate_equal_separate_operations(kind: str, scales: str, device: str) -> None:
    stored, scale, numbers = weights(kind, scales, 256, 256, device)
    x, residual, norm_weight = vectors(1, 256, device), vectors(1, 256, device) + 1, vectors(1, 256, device)[0]
    plan = GemvPlan(8, 256, tiles=2)
    y, stream = quantized_gemv(x, stored, scale, None, None, plan, Activation.SILU, False, norm_weight, EPS)
    assert stream is x
    assert_product(y, rms_norm(x, norm_weight, EPS), numbers, activation=Activation.SILU)
    normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    y, stream = quantized_gemv(x, stored, scale, None, None, plan, None, False, norm_weight, EPS, residual)
    assert_product(y, normed, numbers)
    assert torch.equal(stream, total)


@pytest.mark.parametrize(("kind", "scales"), CASES)
@pytest.mark.parametrize(("split", "activation"), [(1, None), (2, None), (2, Activation.SILU)])
def test_splitk_equals_the_library(
    kind: str, scales: str, split: int, activation: Activation | None, device: str
) -> None:
    outputs = 256 if activation else 141
    plan = SplitKPlan(block_n=64, block_k=64, split=split)
    stored, scale, numbers = weights(kind, scales, outputs, 256, device)
    x, bias = vectors(5, 256, device), torch.ones(outputs, device=device)
    floats, counters = workspace_size(5, outputs // 2 if activation else outputs, plan, activation is not None)
    partials = torch.full((floats,), float("nan"), device=device)
    space = partials, torch.zeros(counters, dtype=torch.int32, device=device)
    y = splitk_gemm(x, stored, bias, plan, *space, activation=activation, scales=scale)
    expected = functional.linear(x, numbers, bias)
    expected = expected if activation is None else gated_activation(expected, activation)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)


def test_every_float8_is_decoded_from_its_bits(device: str) -> None:
    bits = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    numbers = bits.view(torch.float8_e4m3fn).float()
    finite = numbers[:, 0].isfinite()
    x = torch.zeros(1, 16, device=device)
    x[0, 3] = 1
    y, _ = quantized_gemv(x, bits.to(device), torch.ones(256, device=device), None, None, GemvPlan(4, 16))
    assert torch.equal(y[0].cpu()[finite], numbers[:, 3][finite])
    assert (~finite).sum() == 2, "only the two codes of NaN are none of the numbers"
