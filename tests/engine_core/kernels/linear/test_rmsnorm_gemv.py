"""The chunked GEMV with a fused norm, against plain torch, in float32."""

import pytest
import torch
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, norm_gemv
from tandem.engine_core.kernels.linear.rmsnorm_gemv import normed_product, rmsnorm_gemv
from tandem.engine_core.kernels.reference.layer import (
    add_rms_norm,
    gated_activation,
    norm_add_rms_norm,
    rms_norm,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan

# Where the sigmoid is zero, the exponential under it overflows, which only NumPy reports.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

EPS = 1e-5
PLANS = [GemvPlan(rows=4, block_k=16), GemvPlan(rows=2, block_k=16, tiles=2)]


@pytest.mark.parametrize("plan", PLANS, ids=["one_tile", "two_tiles"])
@pytest.mark.parametrize("norms", [0, 1, 2])
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize(("outputs", "inputs"), [(14, 40), (8, 48)])
def test_rmsnorm_gemv_equals_separate_operations(
    outputs: int, inputs: int, activation: Activation | None, norms: int, plan: GemvPlan, device: str
) -> None:
    """norms: 0 of x alone, 1 of x added to the stream, 2 of x normalized and added to it."""
    torch.manual_seed(outputs + inputs + norms)
    x, residual = torch.randn(2, 1, inputs, device=device).unbind(0)
    factors, norm_weight = torch.randn(2, inputs, device=device).unbind(0)
    rows = outputs * (1 if activation is None else 2)
    weight, bias = torch.randn(rows, inputs, device=device), torch.randn(rows, device=device)
    normed, total = rms_norm(x, norm_weight, EPS), x
    if norms == 1:
        normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    elif norms == 2:
        normed, total = norm_add_rms_norm(x, factors, residual, norm_weight, EPS)
    given = (x, residual if norms else None, factors if norms == 2 else None, norm_weight, EPS, weight)
    for chosen in (bias, None):
        expected = functional.linear(normed, weight, chosen)
        y, stream = rmsnorm_gemv(*given, chosen, plan, activation)
        torch.testing.assert_close(y, expected if activation is None else gated_activation(expected, activation))
        torch.testing.assert_close(stream, total)


@pytest.mark.parametrize("norms", [0, 1, 2])
def test_the_plan_chooses_the_kernel(norms: int, device: str) -> None:
    torch.manual_seed(norms)
    x, residual = torch.randn(2, 1, 40, device=device).unbind(0)
    factors, norm_weight = torch.randn(2, 40, device=device).unbind(0)
    weight = torch.randn(8, 40, device=device)
    whole = GemvPlan(rows=4, block_k=64)
    added = residual if norms else None
    normalised = factors if norms == 2 else None
    call = (x, added, normalised, norm_weight, EPS, weight, None)
    if added is None:
        by_gemv = norm_gemv(x, norm_weight, EPS, weight, None, whole), x
    else:
        by_gemv = add_norm_gemv(x, added, norm_weight, EPS, weight, None, whole, x_weight=normalised)
    assert all(torch.equal(one, other) for one, other in zip(normed_product(*call, whole), by_gemv, strict=True))
    in_chunks = rmsnorm_gemv(*call, PLANS[0])
    assert all(torch.equal(one, other) for one, other in zip(normed_product(*call, PLANS[0]), in_chunks, strict=True))
    torch.testing.assert_close(in_chunks[0], by_gemv[0])


def test_factors_of_x_need_a_stream_to_add_it_to(device: str) -> None:
    x, factors = torch.randn(1, 40, device=device), torch.randn(40, device=device)
    with pytest.raises(AssertionError, match=r"x_weight\b.*\bresidual"):
        rmsnorm_gemv(x, None, factors, factors, EPS, torch.randn(8, 40, device=device), None, PLANS[0])
