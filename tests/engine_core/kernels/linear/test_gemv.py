"""The GEMV and its fused operations, against plain torch, in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv, norm_gemv
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


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("inputs", [48, 64])
def test_norm_gemv_equals_separate_operations(inputs: int, activation: Activation | None, device: str) -> None:
    x, weight, bias = operands(26, inputs, device)
    norm_weight = torch.randn(inputs, device=device)
    expected = functional.linear(rms_norm(x, norm_weight, EPS), weight, bias)
    y = norm_gemv(x, norm_weight, EPS, weight, bias, WHOLE, activation)
    torch.testing.assert_close(y, expected_product(expected, activation))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_add_norm_gemv_equals_separate_operations(activation: Activation | None, device: str) -> None:
    x, weight, _ = operands(26, 48, device)
    residual, norm_weight = torch.randn(1, 48, device=device), torch.randn(48, device=device)
    normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    y, stream = add_norm_gemv(x, residual, norm_weight, EPS, weight, None, WHOLE, activation)
    torch.testing.assert_close(y, expected_product(functional.linear(normed, weight), activation))
    assert torch.equal(stream, total)


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
def test_add_norm_gemv_of_a_normalised_update_equals_separate_operations(
    activation: Activation | None, device: str
) -> None:
    x, weight, _ = operands(26, 48, device)
    residual = torch.randn(1, 48, device=device)
    x_weight, norm_weight = torch.randn(2, 48, device=device).unbind(0)
    normed, total = norm_add_rms_norm(x, x_weight, residual, norm_weight, EPS)
    y, stream = add_norm_gemv(x, residual, norm_weight, EPS, weight, None, WHOLE, activation, x_weight=x_weight)
    torch.testing.assert_close(y, expected_product(functional.linear(normed, weight), activation))
    torch.testing.assert_close(stream, total)


def test_gemv_refuses_several_rows_and_plans_of_partial_rows(device: str) -> None:
    x, weight, _ = operands(16, 64, device)
    with pytest.raises(AssertionError):
        gemv(x.expand(2, -1), weight, None, WHOLE)
    with pytest.raises(AssertionError, match="whole rows"):
        gemv(x, weight, None, LONG, Activation.SILU)
    with pytest.raises(AssertionError, match="whole rows"):
        norm_gemv(x, weight[0], EPS, weight, None, LONG)
