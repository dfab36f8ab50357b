"""The activations that gated feed-forward networks may use."""

from enum import IntEnum


class Activation(IntEnum):
    """Elementwise function of a gated network's gate.

    Its number is the kernels' `ACTIVATION`, where 0 stands for no activation.
    """

    SILU = 1
    """x * sigmoid(x) (Hendrycks and Gimpel, 2016), the gate of SwiGLU."""
    GELU_TANH = 2
    """GELU with its tanh approximation (Hendrycks and Gimpel, 2016), the gate of GeGLU."""
