"""The tanh-approximated GELU product in plain torch: the oracle of `activation.gelu_mul`, and the CPU path."""

from torch import Tensor
from torch.nn import functional


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU's product (Shazeer, 2020) with GELU's tanh approximation: gelu(gate) * up.

    gate_up: [T, 2 * width], gate first. Returns [T, width].
    """
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up
