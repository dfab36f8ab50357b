"""The activations that gated feed-forward networks may use."""

from enum import IntEnum


class Activation(IntEnum):
    """An elementwise function of the gate; its number is the kernels' `ACTIVATION`, where 0 stands for none."""

    SILU = 1
    """x * sigmoid(x) (Hendrycks and Gimpel, 2016), the gate of SwiGLU."""
    GELU_TANH = 2
    """GELU with its tanh approximation (Hendrycks and Gimpel, 2016), the gate of GeGLU."""
