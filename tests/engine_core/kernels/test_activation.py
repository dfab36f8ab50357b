"""The Triton activation products against their oracles, in float32."""

from collections.abc import Callable

import pytest
import torch

from tandem.engine_core.kernels.activation import gelu_mul, silu_mul
from tandem.engine_core.kernels.reference import layer as reference

# Where the sigmoid is zero, the exponential under it overflows, which only NumPy reports.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

PAIRS = [(silu_mul, reference.silu_mul), (gelu_mul, reference.gelu_mul)]


@pytest.mark.parametrize(("kernel", "oracle"), PAIRS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 300)])
def test_product(
    kernel: Callable[..., torch.Tensor], oracle: Callable[..., torch.Tensor], tokens: int, width: int, device: str
) -> None:
    gate_up = torch.randn(tokens, 2 * width, device=device) * 4
    torch.testing.assert_close(kernel(gate_up), oracle(gate_up), atol=1e-5, rtol=1e-5)


def test_gelu_is_the_tanh_form(device: str) -> None:
    x = torch.linspace(-30, 30, 101, device=device)
    ones = torch.ones_like(x)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu_mul(torch.stack((x, ones), 1).reshape(101, 2))[:, 0], expected, atol=1e-5, rtol=0)


def test_no_rows_and_odd_widths(device: str) -> None:
    assert silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)
    with pytest.raises(ValueError, match="beside"):
        silu_mul(torch.empty(2, 7, device=device))
