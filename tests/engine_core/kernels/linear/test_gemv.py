"""The GEMV and its fused operations, against plain torch, in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
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
def test_gemv_equals_the_library(outputs: int, inputs: int, plan: GemvPlan, with_bias: bool, device: str) -> None:
    x, weight, bias = operands(outputs, inputs, device)
    chosen = bias if with_bias else None
    y = gemv(x, weight, chosen, plan)
    torch.testing.assert_close(y, functional.linear(x, weight, chosen))
    space = torch.full((2, outputs), torch.nan, device=device)
    gemv(x, weight, chosen, plan, out=space[:1])
    assert torch.equal(space[:1], y) and space[1:].isnan().all()


ACTIVATIONS = [Activation.SILU, Activation.GELU_TANH]


def expected_product(product: Tensor, activation: Activation | None) -> Tensor:
    return product if activation is None else gated_activation(product, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [8, 11])
def test_gemv_before_an_activation_equals_separate_operations(
    width: int, with_bias: bool, activation: Activation, device: str
) -> None:
    x, weight, bias = operands(2 * width, 48, device)
    chosen = bias if with_bias else None
    expected = gated_activation(functional.linear(x, weight, chosen), activation)
    torch.testing.assert_close(gemv(x, weight, chosen, WHOLE, activation), expected)


PLANS = {"whole": WHOLE, "chunks": LONG, "tiles of chunks": GemvPlan(rows=2, block_k=16, tiles=2)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("norms", [0, 1, 2])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("outputs", "inputs"), [(14, 40), (8, 48), (13, 64)])
def test_normed_gemv_equals_separate_operations(
    outputs: int, inputs: int, activation: Activation | None, norms: int, plan: str, device: str
) -> None:
    """norms: 0 of x alone, 1 of x added to the stream, 2 of x normalized and added to it."""
    x, weight, bias = operands(outputs * (1 if activation is None else 2), inputs, device)
    residual = torch.randn(1, inputs, device=device)
    factors, norm_weight = torch.randn(2, inputs, device=device).unbind(0)
    normed, total = rms_norm(x, norm_weight, EPS), x
    if norms == 1:
        normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    elif norms == 2:
        normed, total = norm_add_rms_norm(x, factors, residual, norm_weight, EPS)
    given = (x, residual if norms else None, factors if norms == 2 else None, norm_weight, EPS, weight)
    for chosen in (bias, None):
        y, stream = normed_gemv(*given, chosen, PLANS[plan], activation)
        expected = expected_product(functional.linear(normed, weight, chosen), activation)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(stream, total)


def test_factors_of_x_need_a_stream_to_add_it_to(device: str) -> None:
    x, factors = torch.randn(1, 40, device=device), torch.randn(40, device=device)
    with pytest.raises(AssertionError, match=r"x_weight\b.*\bresidual"):
        normed_gemv(x, None, factors, factors, EPS, torch.randn(8, 40, device=device), None, LONG)


@pytest.mark.parametrize("plan", [WHOLE, LONG], ids=["whole", "long"])
@pytest.mark.parametrize(("outputs", "inputs"), [(13, 48), (3, 40)])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_gemv_of_several_rows_equals_the_library(
    rows: int, outputs: int, inputs: int, plan: GemvPlan, device: str
) -> None:
    x, weight, bias = operands(outputs, inputs, device)
    x = torch.randn(rows, inputs, device=device)
    y = gemv(x, weight, bias, plan)
    torch.testing.assert_close(y, functional.linear(x, weight, bias))
    # Rows past the last are computed, but not stored.
    space = torch.full((4, outputs), torch.nan, device=device)
    gemv(x, weight, bias, plan, out=space[:rows])
    assert torch.equal(space[:rows], y) and space[rows:].isnan().all()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("norms", [0, 1, 2])
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_each_of_several_rows_equals_that_row_alone(
    rows: int, activation: Activation | None, norms: int, plan: str, device: str
) -> None:
    """Up to the order of additions, which the interpreter chooses by the number of rows."""
    outputs, inputs = 13, 40
    _, weight, bias = operands(outputs * (1 if activation is None else 2), inputs, device)
    x, residual = torch.randn(2, rows, inputs, device=device).unbind(0)
    # Rows of very different sizes, as one of an attention sink next to others.
    x[0] *= 1000
    factors, norm_weight = torch.randn(2, inputs, device=device).unbind(0)
    given = (factors if norms == 2 else None, norm_weight, EPS, weight, bias, PLANS[plan], activation)
    y, stream = normed_gemv(x, residual if norms else None, *given)
    for row in range(rows):
        own = slice(row, row + 1)
        alone, own_stream = normed_gemv(x[own], residual[own] if norms else None, *given)
        torch.testing.assert_close(y[own], alone, atol=1e-4, rtol=1e-5)
        assert torch.equal(stream[own], own_stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_rows_of_16_bits_are_close_to_separate_operations(dtype: torch.dtype, device: str) -> None:
    _, weight, bias = operands(24, 64, device)
    x, residual = torch.randn(2, 4, 64, device=device).to(dtype).unbind(0)
    norm_weight = torch.rand(64, device=device).to(dtype)
    y, stream = normed_gemv(x, residual, None, norm_weight, EPS, weight.to(dtype), bias.to(dtype), WHOLE)
    normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    torch.testing.assert_close(stream, total, atol=2e-2, rtol=1e-2)  # The interpreter truncates bfloat16.
    expected = functional.linear(normed.float(), weight.to(dtype).float(), bias.to(dtype).float())
    torch.testing.assert_close(y.float(), expected, atol=0.1, rtol=2e-2)


def test_gemv_refuses_more_than_four_rows_and_plans_of_partial_rows(device: str) -> None:
    x, weight, _ = operands(16, 64, device)
    with pytest.raises(AssertionError, match=r"\b5\b"):
        gemv(x.expand(5, -1).contiguous(), weight, None, WHOLE)
    with pytest.raises(AssertionError, match="whole rows"):
        gemv(x, weight, None, LONG, Activation.SILU)
