"""8-bit linear weights in groups, with 16-bit activations, from GPTQ and compressed-tensors."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.quantized.grouped_linear import GroupedLinear
from tandem.engine_core.layers.quantized.quantized_linear import reject_overflow
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.loader.slots import FLOAT_DTYPES, WeightSlot
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.scheme import W8A16Scheme

PER_WORD = 4
"""8-bit values in an int32."""
ZERO_POINT = 128
"""Zero point of packed values, the only one that is supported."""
_ROWS = 1024
"""Outputs that are dequantized or sorted at a time, to limit the memory of copies."""
_DTYPES = {"fp8": ("F8_E4M3", torch.float8_e4m3fn), "int8": ("I8", torch.int8)}


class W8A16Linear(GroupedLinear):
    """8-bit weights with a scale per output and group of inputs."""

    def __init__(
        self, values: Tensor, scales: Tensor, scheme: W8A16Scheme, bias: Tensor | None, kernels: KernelSet
    ) -> None:
        """Store the weights.

        values: [outputs, inputs], float8_e4m3fn, or int8 less the zero point; scales: [outputs, groups] float32; bias:
        [outputs]. They come from `empty_w8a16`.
        """
        name = "g_idx" if scheme.packing == "gptq" else "weight_g_idx"
        super().__init__(scales, values.shape[1], name, scheme.ordered, bias, kernels)
        self.values = values
        self.scheme = scheme
        self._checked = torch.zeros(values.shape[0], device=values.device, dtype=torch.uint8)
        """Region of the slots of zero points, which are checked but not kept."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized`; the inputs are in `order`."""
        weight = torch.empty(self.values.shape, device=self.values.device, dtype=dtype)
        for start in range(0, self.values.shape[0], _ROWS):
            scales = self.scales[start : start + _ROWS]
            rows = self.values[start : start + _ROWS].float().view(*scales.shape, -1)
            weight[start : start + _ROWS] = (rows * scales[:, :, None]).flatten(1)
        return weight

    def sort_inputs(self, order: Tensor) -> None:
        """Implement `GroupedLinear.sort_inputs`."""
        values = self.values.view(torch.uint8)
        for start in range(0, values.shape[0], _ROWS):
            rows = values[start : start + _ROWS]
            rows.copy_(rows[:, order])

    def output_tables(self) -> list[Tensor]:
        """Implement `GroupedLinear.output_tables`."""
        return [self.values.view(torch.uint8), self.scales]

    def part_slots(self, projection: str, start: int, length: int) -> list[WeightSlot]:
        """Implement `GroupedLinear.part_slots`."""
        groups, words = self.scales.shape[1], self.inputs // PER_WORD

        def slot(
            name: str,
            parameter: Tensor,
            shape: tuple[int, int],
            transform: Callable[[Tensor], Tensor],
            dtypes: tuple[str, ...],
        ) -> WeightSlot:
            given = {"transform": transform, "dtypes": dtypes, "shapes": (shape,)}
            return WeightSlot(f"{projection}.{name}", parameter, 0, start, length, **given)  # type: ignore[arg-type]

        if self.scheme.packing == "gptq":
            scales = reject_overflow(f"{projection}.scales", Tensor.t, multiplied_by=self.scheme.max_value)
            zeros = partial(_check_zeros, f"{projection}.qzeros", ZERO_POINT - self.scheme.zero_offset, length)
            return [
                slot("qweight", self.values, (words, length), lambda stored: _unpacked(stored.t()), ("I32",)),
                slot("scales", self.scales, (groups, length), scales, FLOAT_DTYPES),
                slot("qzeros", self._checked, (groups, length // PER_WORD), zeros, ("I32",)),
            ]
        scales = reject_overflow(
            f"{projection}.weight_scale", lambda stored: stored, multiplied_by=self.scheme.max_value
        )
        scale_slot = slot("weight_scale", self.scales, (length, groups), scales, FLOAT_DTYPES)
        if self.scheme.packing == "compressed-tensors":
            return [slot("weight_packed", self.values, (length, words), _unpacked, ("I32",)), scale_slot]
        stored, _ = _DTYPES[self.scheme.kind]
        return [WeightSlot(f"{projection}.weight", self.values, 0, start, length, dtypes=(stored,)), scale_slot]


def _unpacked(words: Tensor) -> Tensor:
    """Return values less the zero point, [rows, 4 W] int8. words: [rows, W] int32, the lowest byte first."""
    return (words.contiguous().view(torch.uint8) ^ ZERO_POINT).view(torch.int8)


def _check_zeros(name: str, expected: int, length: int, stored: Tensor) -> Tensor:
    """Return a region for checked zero points, [length]. Raises ConfigError if one differs from the expected."""
    if not bool((stored.contiguous().view(torch.uint8) == expected).all()):
        raise ConfigError(
            f"{name}: weights of 8 bits must have the zero point {ZERO_POINT}; quantize the model again with sym true"
        )
    return torch.zeros(length, device=stored.device, dtype=torch.uint8)


class W8A16Method:
    """Linear method of 8-bit weights in groups, for any device."""

    def __init__(self, scheme: W8A16Scheme) -> None:
        self.scheme = scheme

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`.

        Raises ConfigError for a shape that words and groups do not divide.
        """
        values, scales = empty_w8a16(outputs, inputs, self.scheme, context.device)
        return W8A16Linear(values, scales, self.scheme, empty_bias(outputs, bias, context), context.kernels)


def empty_w8a16(outputs: int, inputs: int, scheme: W8A16Scheme, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate values and scales; see `W8A16Linear`."""
    group = scheme.group or inputs
    if inputs % group or inputs % PER_WORD or outputs % PER_WORD:
        raise unsupported(
            f"the projection has {inputs} inputs and {outputs} outputs; 8-bit weights in groups need multiples of "
            f"{PER_WORD}, and inputs in groups of {group}"
        )
    values = torch.empty(outputs, inputs, device=device, dtype=_DTYPES[scheme.kind][1])
    return values, torch.empty(outputs, inputs // group, device=device)
