"""Checkpoint slots of int4 tensors.

They convert the layouts of several tools to that of `Int4Linear`.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.quantized.quantized_linear import reject_overflow
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.int4 import PER_WORD, pack, unpack, unpack_awq
from tandem.engine_core.quantization.scheme import Int4Scheme

Transform = Callable[[Tensor], Tensor]
_MAX_VALUE = 15
"""Maximum absolute difference of a value and a zero point."""
_SYMMETRIC_ZERO = 8
"""Zero point of symmetric int4 weights."""


def int4_slots(
    projection: str, start: int, length: int, words: Tensor, scales: Tensor, zeros: Tensor, scheme: Int4Scheme
) -> list[WeightSlot]:
    """List the slots of a projection's int4 values, scales and zero points.

    projection: name; start, length: its outputs; words, scales, zeros: of `Int4Linear`.
    """
    inputs, groups = words.shape[1] * PER_WORD, scales.shape[1]
    narrow = length // PER_WORD

    def checked(name: str, transform: Transform) -> Transform:
        return reject_overflow(f"{projection}.{name}", transform, multiplied_by=_MAX_VALUE)

    def int32_slot(name: str, parameter: Tensor, shape: tuple[int, int], transform: Transform | None) -> WeightSlot:
        return replace(float_slot(name, parameter, shape, transform), dtypes=("I32",))

    def float_slot(name: str, parameter: Tensor, shape: tuple[int, int], transform: Transform | None) -> WeightSlot:
        return WeightSlot(f"{projection}.{name}", parameter, 0, start, length, transform=transform, shapes=(shape,))

    if scheme.packing == "gptq":
        return [
            int32_slot("qweight", words, (inputs // PER_WORD, length), Tensor.t),
            float_slot("scales", scales, (groups, length), checked("scales", Tensor.t)),
            int32_slot("qzeros", zeros, (groups, narrow), _gptq_zeros(scheme, f"{projection}.qzeros")),
        ]
    if scheme.packing == "awq":
        return [
            int32_slot("qweight", words, (inputs, narrow), _awq_words),
            float_slot("scales", scales, (groups, length), checked("scales", Tensor.t)),
            int32_slot("qzeros", zeros, (groups, narrow), _awq_zeros),
        ]
    found = [
        int32_slot("weight_packed", words, (length, inputs // PER_WORD), None),
        float_slot("weight_scale", scales, (length, groups), checked("weight_scale", lambda stored: stored)),
    ]
    return found if scheme.symmetric else [*found, int32_slot("weight_zero_point", zeros, (narrow, groups), _zeros)]


def _awq_words(stored: Tensor) -> Tensor:
    """Repack words along the inputs, [outputs, inputs / 8].

    stored: words along the outputs, [inputs, outputs / 8].
    """
    return pack(unpack_awq(stored).t())


def _awq_zeros(stored: Tensor) -> Tensor:
    return unpack_awq(stored).t()


def _zeros(stored: Tensor) -> Tensor:
    """Unpack zero points, [outputs, groups]. stored: [outputs / 8, groups]."""
    return unpack(stored.t()).t()


def _gptq_zeros(scheme: Int4Scheme, name: str) -> Transform:
    """Return a function from stored zero points, [groups, outputs / 8], to actual ones, [outputs, groups].

    GPTQ's first format stores one less, modulo 16, so a zero point of 0 is stored as 15. The function raises
    ConfigError for others than 8 in a symmetric checkpoint, as a file of the other format has them.
    """

    def actual(stored: Tensor) -> Tensor:
        zeros = ((unpack(stored) + scheme.zero_offset) & 15).t()
        if scheme.symmetric and not bool((zeros == _SYMMETRIC_ZERO).all()):
            raise ConfigError(
                f"{name}: quantization_config has sym true, but the zero points are not {_SYMMETRIC_ZERO} in the "
                f"format {'gptq' if scheme.zero_offset else 'gptq_v2'}; correct its sym, or its checkpoint_format"
            )
        return zeros

    return actual
