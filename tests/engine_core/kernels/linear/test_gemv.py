"""The GEMV and what is fused with it, against plain torch, in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv, gemv_silu_mul, norm_gemv
from tandem.engine_core.kernels.linear.plans import GemvPlan
from tandem.engine_core.kernels.reference.layer import add_rms_norm, rms_norm, silu_mul

EPS = 1e-5
WHOLE = GemvPlan(rows=4, block_k=64, tiles=2)
LONG = GemvPlan(rows=4, block_k=16)


def operands(outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(outputs + inputs)
    weight, bias = torch.randn(outputs, inputs, device=device), torch.randn(outputs, device=device)
    return torch.randn(1, inputs, device=device), weight, bias


@pytest.mark.parametrize("plan", [WHOLE, LONG], ids=["whole", "long"])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (13, 48), (3, 40)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(outputs: int, inputs: int, plan: GemvPlan, with_bias: bool, device: str) -> None:
    x, weight, bias = operands(outputs, inputs, device)
    chosen = bias if with_bias else None
    torch.testing.assert_close(gemv(x, weight, chosen, plan), functional.linear(x, weight, chosen))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [8, 11])
def test_silu(width: int, with_bias: bool, device: str) -> None:
    x, weight, bias = operands(2 * width, 48, device)
    chosen = bias if with_bias else None
    expected = silu_mul(functional.linear(x, weight, chosen))
    torch.testing.assert_close(gemv_silu_mul(x, weight, chosen, WHOLE), expected)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("inputs", [48, 64])
def test_norm(inputs: int, silu: bool, device: str) -> None:
    x, weight, bias = operands(26, inputs, device)
    norm_weight = torch.randn(inputs, device=device)
    expected = functional.linear(rms_norm(x, norm_weight, EPS), weight, bias)
    y = norm_gemv(x, norm_weight, EPS, weight, bias, WHOLE, silu)
    torch.testing.assert_close(y, silu_mul(expected) if silu else expected)


@pytest.mark.parametrize("silu", [False, True])
def test_norm_of_the_sum(silu: bool, device: str) -> None:
    x, weight, _ = operands(26, 48, device)
    residual, norm_weight = torch.randn(1, 48, device=device), torch.randn(48, device=device)
    normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    y, stream = add_norm_gemv(x, residual, norm_weight, EPS, weight, None, WHOLE, silu)
    expected = functional.linear(normed, weight)
    torch.testing.assert_close(y, silu_mul(expected) if silu else expected)
    assert torch.equal(stream, total)


def test_refuses_what_it_cannot_fuse(device: str) -> None:
    x, weight, _ = operands(16, 64, device)
    with pytest.raises(AssertionError):
        gemv(x.expand(2, -1), weight, None, WHOLE)
    with pytest.raises(AssertionError, match="whole rows"):
        gemv_silu_mul(x, weight, None, LONG)
    with pytest.raises(AssertionError, match="whole rows"):
        norm_gemv(x, weight[0], EPS, weight, None, LONG)
