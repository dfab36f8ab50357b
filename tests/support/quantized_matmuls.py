"""What `quantized_gemv` may return: a product whose inputs and sums are rounded as float16 is."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.reference.layer import gated_activation

SHARE = 3e-3
"""By how much of the root of its squared products' sum a result may be off; numbers in a wrong order differ by all."""


def assert_product(
    found: Tensor,
    x: Tensor,
    numbers: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    relative: float = 1e-4,
) -> None:
    """Assert that a row times a weight is right within the rounding of its products.

    x: [1, K]; numbers: what the weight stands for, [N, K], with an activation the gate's rows first; relative: by how
    much of itself a result may be off besides.
    """
    exact = x.double() @ numbers.double().t()
    exact = exact if bias is None else exact + bias.double()
    off = SHARE * (x.double().square() @ numbers.double().square().t()).sqrt()
    if activation is not None:
        (gate, up), (gate_off, up_off) = exact.chunk(2, 1), off.chunk(2, 1)
        exact = gated_activation(exact.float(), activation).double()
        # No activation is steeper than 1.2.
        off = 1.2 * gate_off * up.abs() + (gate.abs() + 1.2 * gate_off) * up_off
    wrong = (found.double() - exact).abs() - off - relative * exact.abs() - 1e-6
    assert wrong.max() <= 0, f"{int((wrong > 0).sum())} of {wrong.numel()} results are off by {wrong.max():.2e} more"
    assert torch.isfinite(found).all()
