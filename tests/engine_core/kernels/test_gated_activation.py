"""The Triton gated activations against their oracle, in float32."""

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.reference import layer as reference

# Where the sigmoid is zero, the exponential under it overflows, which only NumPy reports.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 300)])
def test_gated_activation_equals_its_oracle(activation: Activation, tokens: int, width: int, device: str) -> None:
    gate_up = torch.randn(tokens, 2 * width, device=device) * 4
    expected = reference.gated_activation(gate_up, activation)
    torch.testing.assert_close(gated_activation(gate_up, activation), expected, atol=1e-5, rtol=1e-5)


def test_gelu_is_the_tanh_form(device: str) -> None:
    x = torch.linspace(-30, 30, 101, device=device)
    gate_up = torch.stack((x, torch.ones_like(x)), 1).reshape(101, 2)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gated_activation(gate_up, Activation.GELU_TANH)[:, 0], expected, atol=1e-5, rtol=0)


def test_gated_activation_takes_no_rows_and_refuses_odd_widths(device: str) -> None:
    assert gated_activation(torch.empty(0, 8, device=device), Activation.SILU).shape == (0, 4)
    with pytest.raises(ValueError, match="halves"):
        gated_activation(torch.empty(2, 7, device=device), Activation.SILU)
