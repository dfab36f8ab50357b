"""Quantization schemes of the linear weights of a checkpoint."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal

MAX_VALUES = {"fp8": 448.0, "int8": 128.0}
"""Maximum absolute value of 8-bit weights, before their scale."""


class Activations(Enum):
    """Granularity of activation quantization that a checkpoint expects."""

    UNQUANTIZED = "unquantized"
    TOKEN = "token"
    """Dynamic, one scale per token (with block scales: per token and 128 inputs)."""
    TENSOR = "tensor"
    """Dynamic, one scale for all tokens of a step."""
    STATIC = "static"
    """Static, one scale per projection, stored in the checkpoint."""


@dataclass(frozen=True, slots=True)
class EightBitScheme:
    """8-bit weights with scales."""

    kind: Literal["fp8", "int8"]
    """Float8 e4m3, or int8."""
    activations: Activations
    scale_name: str = "weight_scale"
    """Usual last component of the name of the scale tensor."""
    per_tensor: bool = False
    """True for one scale per projection, False for one per output (or per block)."""
    block: tuple[int, int] | None = None
    """Block shape, outputs by inputs; None: no blocks."""
    from_floats: bool = False
    """True if the checkpoint is not quantized, and weights are quantized while loading."""

    def __str__(self) -> str:
        return self.kind if self.block is None else f"{self.kind} in blocks of {self.block[0]}x{self.block[1]}"

    @property
    def max_value(self) -> float:
        """Maximum absolute value of a weight before its scale."""
        return MAX_VALUES[self.kind]

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Last components that the name of the scale tensor may have, the usual one first.

        Transformers writes FP8 scales as `weight_scale_inv`, other tools as `weight_scale`; both multiply.
        """
        names = ("weight_scale", "weight_scale_inv") if self.kind == "fp8" else ("weight_scale",)
        return tuple(sorted(names, key=lambda name: name != self.scale_name))

    @property
    def has_input_scale(self) -> bool:
        """True if a static input scale is read for each projection.

        Weights with block scales use dynamic group scales instead, which are finer.
        """
        return self.activations is Activations.STATIC and self.block is None


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """Int4 weights.

    Groups of inputs share a scale and a zero point. A weight is scale * (q - zero), q from 0 to 15.
    """

    packing: Literal["gptq", "awq", "compressed-tensors"]
    """Tensor layout, named after the tool that defines it."""
    group: int | None
    """Group size: number of inputs; None: one group for all inputs."""
    symmetric: bool
    """True if every zero point is 8. GPTQ and AWQ store zero points in any case."""
    ordered: bool = False
    """True if the tensor `g_idx` has the group of each input (act-order); else groups are consecutive."""
    zero_offset: int = 0
    """Offset of stored zero points: 1 in GPTQ's first format, which stores one less."""

    def __str__(self) -> str:
        return f"4 bits ({self.packing})"


@dataclass(frozen=True, slots=True)
class W8A16Scheme:
    """8-bit weights with a scale per output and group of inputs, and 16-bit activations.

    A weight is scale * q for float8 e4m3 and int8, and scale * (q - 128) for packed q from 0 to 255.
    """

    kind: Literal["fp8", "int8"]
    packing: Literal["gptq", "compressed-tensors"] | None
    """Layout of four values in an int32, named after the tool that defines it; None: a tensor of 8-bit numbers."""
    group: int | None
    """Group size: number of inputs; None: one group for all inputs."""
    ordered: bool = False
    """As in `Int4Scheme`."""
    zero_offset: int = 0
    """As in `Int4Scheme`."""

    def __str__(self) -> str:
        return f"{self.kind} in groups of {self.group}" if self.packing is None else f"8 bits ({self.packing})"

    @property
    def max_value(self) -> float:
        """Maximum absolute value of a weight before its scale."""
        return MAX_VALUES[self.kind]


Scheme = EightBitScheme | Int4Scheme | W8A16Scheme


def scheme_texts(one: Scheme | None, other: Scheme | None) -> tuple[str, str]:
    """Return the texts of two schemes, None for 16 bits, with the fields in which schemes of one text differ."""
    texts = str(one or "16 bits"), str(other or "16 bits")
    if one is None or other is None or texts[0] != texts[1]:
        return texts
    names = [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name, None)]
    first, second = [", ".join(f"{name} {_value(scheme, name)}" for name in names) for scheme in (one, other)]
    return f"{texts[0]} with {first}", f"{texts[1]} with {second}"


def _value(scheme: Scheme, name: str) -> str:
    value = getattr(scheme, name)
    return str(value.value if isinstance(value, Enum) else value)


ONLINE_FP8 = EightBitScheme("fp8", Activations.TOKEN, from_floats=True)
"""Scheme of `--quantize fp8`: one scale per output."""
