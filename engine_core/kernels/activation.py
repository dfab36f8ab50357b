"""Activation functions of gated feed-forward networks."""

from enum import IntEnum


class Activation(IntEnum):
    """Elementwise activation of a gate.

    Its value is the kernels' `ACTIVATION`; 0 means no activation.
    """

    SILU = 1
    """x * sigmoid(x) (Hendrycks and Gimpel, 2016), the gate of SwiGLU."""
    GELU_TANH = 2
    """GELU with its tanh approximation (Hendrycks and Gimpel, 2016), the gate of GeGLU."""
