"""Schemes: what the linear weights of a quantized checkpoint are made of."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Activations(Enum):
    """The way in which a checkpoint expects the inputs of its products to be rounded."""

    UNQUANTIZED = "unquantized"
    TOKEN = "token"
    """To a scale for each token, found when it is computed (for weights in blocks: for each token and 128 inputs)."""
    TENSOR = "tensor"
    """To one scale for all tokens of a step, found when it is computed."""
    STATIC = "static"
    """To one scale for each projection, which the checkpoint holds."""


@dataclass(frozen=True, slots=True)
class EightBitScheme:
    """Weights of one byte each, that are multiplied by a scale."""

    kind: Literal["fp8", "int8"]
    """Float8 e4m3, or integers from -128 to 127."""
    activations: Activations
    scale_name: str = "weight_scale"
    """Last part of the name of the tensor of scales."""
    per_tensor: bool = False
    """True if a projection has one scale, False if each of its outputs has one (or each block)."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: all inputs of an output share one."""
    from_floats: bool = False
    """True if the checkpoint is not quantized, and its weights are as they are loaded."""

    def __str__(self) -> str:
        return self.kind if self.block is None else f"{self.kind} in blocks of {self.block[0]}x{self.block[1]}"

    @property
    def has_input_scale(self) -> bool:
        """True if a scale for the inputs of each projection is read.

        The checkpoint holds it. Weights in blocks take inputs in groups, whose scales are finer.
        """
        return self.activations is Activations.STATIC and self.block is None


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """Weights of four bits each.

    Groups of inputs share a scale and a zero point.
    A weight is scale * (q - zero), q from 0 to 15.
    """

    packing: Literal["gptq", "awq", "compressed-tensors"]
    """Layout of the tensors, named after the tool whose it is."""
    group: int | None
    """Number of inputs of a group; None: all inputs are one group."""
    symmetric: bool
    """True if every zero point is 8. GPTQ and AWQ store zero points all the same."""
    ordered: bool = False
    """True if the tensor `g_idx` tells the group of each input (act-order); else groups follow one another."""
    zero_offset: int = 0
    """What is added to a stored zero point: 1 in GPTQ's first format, which stores one less."""

    def __str__(self) -> str:
        return f"4 bits ({self.packing})"


Scheme = EightBitScheme | Int4Scheme
ONLINE_FP8 = EightBitScheme("fp8", Activations.TOKEN, from_floats=True)
"""Scheme of `--quantize fp8`: a scale for each output."""
