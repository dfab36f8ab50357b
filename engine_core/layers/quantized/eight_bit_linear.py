"""8-bit linear weights, FP8 and INT8, with per-tensor, per-output or block scales."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_COLUMNS, SCALE_ROWS
from tandem.engine_core.kernels.quantized_activation import FP8_MAX, ActivationFormat
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.quantized.quantized_linear import (
    MAX_WEIGHT,
    QuantizedLinear,
    part_slices,
    reject_overflow,
)
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme

_DTYPES = {"fp8": ("F8_E4M3", torch.float8_e4m3fn), "int8": ("I8", torch.int8)}
_INPUT_SCALES = ("input_scale", "activation_scale")
"""Last components of the names of static input scales: of most tools, and of transformers."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale that inputs or weights are divided by: that of normal numbers, as GPUs may flush smaller ones to 0."""
_ROWS = 4096
"""Outputs dequantized at a time, to limit the memory of float32 intermediates."""


class EightBitLinear(QuantizedLinear):
    """8-bit weights with float32 scales.

    A per-tensor scale is stored per output, so parts of a fused projection may have different ones.
    """

    def __init__(
        self, values: Tensor, scales: Tensor, scheme: EightBitScheme, bias: Tensor | None, kernels: KernelSet
    ) -> None:
        """Store the weights.

        values: [outputs, inputs], float8_e4m3fn or int8; scales: float32, [outputs], or with block scales [outputs /
        16, inputs / 128], rounded up: the checkpoint's repeated for each 16 outputs, so parts of a fused projection
        need not end at block boundaries; bias: [outputs].
        """
        super().__init__(bias, kernels)
        self.values = values
        self.scales = scales
        self.scheme = scheme
        self.input_scale = torch.ones(1, device=values.device) if scheme.has_input_scale else None
        """Static input scale of the checkpoint, [1] float32; for a fused projection the maximum of its parts."""

    def activation_format(self) -> ActivationFormat | None:
        """Return the format of quantized inputs, None if they are never quantized.

        Used by GPUs with 8-bit matmuls.
        """
        outputs, inputs = self.values.shape
        if not uses_w8a8(outputs, inputs, self.scheme):
            return None
        if self.scheme.block is not None:
            return ActivationFormat(self.values.dtype, SCALE_COLUMNS)
        return ActivationFormat(self.values.dtype, scale=self.input_scale)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized`."""
        outputs, inputs = self.values.shape
        weight = torch.empty(outputs, inputs, device=self.values.device, dtype=dtype)
        for start in range(0, outputs, _ROWS):
            rows = self.values[start : start + _ROWS].float()
            weight[start : start + _ROWS] = rows * self._scales(start, rows.shape[0])
        return weight

    def _scales(self, start: int, count: int) -> Tensor:
        """Return the scales of consecutive outputs, [count, 1 or inputs].

        start: the first, a multiple of a block.
        """
        if self.scheme.block is None:
            return self.scales[start : start + count, None]
        blocks = self.scales[start // SCALE_ROWS : ceil_div(start + count, SCALE_ROWS)]
        spread = blocks.repeat_interleave(SCALE_ROWS, 0)[:count].repeat_interleave(SCALE_COLUMNS, 1)
        return spread[:, : self.values.shape[1]]

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`: `weight` and its scales.

        Raises ConfigError if a part of a fused projection ends within 16 outputs that share a scale.
        """
        if self.scheme.from_floats:
            return self._float_slots(prefix, name, parts)
        stored, _ = _DTYPES[self.scheme.kind]
        slots = []
        for projection, start, length in part_slices(prefix, name, parts, self.values.shape[0]):
            slots.append(WeightSlot(f"{projection}.weight", self.values, 0, start, length, dtypes=(stored,)))
            slots += [self._scale_slot(f"{projection}.{scale}", start, length) for scale in self.scheme.scale_names]
        return slots if self.input_scale is None else slots + self._input_slots(prefix, name, parts)

    def _input_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """List the slots of the static input scales: `input_scale`, or `activation_scale` of transformers."""
        count = len(parts or {}) or 1
        found = torch.ones(count, device=self.values.device)
        keep = partial(self._keep_input_scale, found)
        slots = []
        for index, (projection, _, length) in enumerate(part_slices(prefix, name, parts, self.values.shape[0])):
            first, length = (0, count) if index == len(parts or {}) else (index, 1)
            slots += [
                WeightSlot(
                    f"{projection}.{last}",
                    found,
                    0,
                    first,
                    length,
                    shapes=((), (1,), (1, 1)),
                    on_filled=keep,
                    transform=partial(_checked_input_scale, f"{projection}.{last}", length),
                )
                for last in _INPUT_SCALES
            ]
        return slots

    def _keep_input_scale(self, found: Tensor) -> None:
        """Keep the maximum scale of a projection's parts, which have the same inputs."""
        assert self.input_scale is not None
        self.input_scale.copy_(found.max())

    def _float_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """List the slots of weights that are quantized while loading.

        Each tensor is read twice, once for its scales.
        """
        slots = []
        for projection, start, length in part_slices(prefix, name, parts, self.values.shape[0]):
            shapes = ((length, self.values.shape[1]),)
            for parameter, transform in (
                (self.values, quantize_weight),
                (self.scales, reject_overflow(f"{projection}.weight", row_scales, "weights")),
            ):
                slots.append(
                    WeightSlot(f"{projection}.weight", parameter, 0, start, length, transform=transform, shapes=shapes)
                )
        return slots

    def _scale_slot(self, name: str, start: int, length: int) -> WeightSlot:
        if self.scheme.block is not None:
            return self._block_slot(name, start, length, self.scheme.block[0])

        # Files differ in the shape of a scalar, and compressed-tensors stores a column.
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1)) if self.scheme.per_tensor else ((length, 1), (length,))
        spread = reject_overflow(name, partial(_spread, length=length), multiplied_by=self.scheme.max_value)
        return WeightSlot(name, self.scales, 0, start, length, transform=spread, shapes=shapes)

    def _block_slot(self, name: str, start: int, length: int, high: int) -> WeightSlot:
        """Return the slot of block scales.

        high: outputs of a block in the checkpoint.
        """
        if start % SCALE_ROWS:
            raise unsupported(
                f"{name}: the projection before it in a fused one ends at output {start}, which is not a multiple of "
                f"{SCALE_ROWS}"
            )
        rows = ceil_div(length, SCALE_ROWS)
        return WeightSlot(
            name,
            self.scales,
            0,
            start // SCALE_ROWS,
            rows,
            shapes=((ceil_div(length, high), self.scales.shape[1]),),
            transform=reject_overflow(
                name,
                lambda stored: stored.repeat_interleave(high // SCALE_ROWS, 0)[:rows],
                multiplied_by=self.scheme.max_value,
            ),
        )


def _spread(scale: Tensor, length: int) -> Tensor:
    return scale.reshape(-1).expand(length)


def _checked_input_scale(name: str, length: int, stored: Tensor) -> Tensor:
    """Return the static input scale of a part for each of its regions, [length] float32.

    Raises ConfigError for a scale that is not a positive number, so small that its inverse is infinite, or so large
    that a step overflows.
    """
    scale = stored.float().item()
    if not _LEAST_SCALE <= scale <= MAX_WEIGHT:
        raise ConfigError(f"{name} is {scale:g}; it must be a positive number, from {_LEAST_SCALE:g} to {MAX_WEIGHT:g}")
    return _spread(stored, length)


def uses_w8a8(outputs: int, inputs: int, scheme: EightBitScheme) -> bool:
    """Return whether a layer uses quantized inputs on GPUs with 8-bit matmuls."""
    for_library = scheme.kind == "fp8" and scheme.block is None and outputs % 16 == inputs % 16 == 0
    return scheme.activations is not Activations.UNQUANTIZED and (inputs % SCALE_COLUMNS == 0 or for_library)


def row_scales(weight: Tensor) -> Tensor:
    """Return scales that map the absolute maximum of each row to FP8_MAX.

    [outputs] float32, 1 for a row of zeros or of numbers that no float32 scale fits. weight: [outputs, inputs].
    """
    scales = weight.abs().amax(1).float() / FP8_MAX
    return torch.where(scales >= _LEAST_SCALE, scales, 1.0)


def quantize_weight(weight: Tensor) -> Tensor:
    """Return weights divided by the scales of their rows, [outputs, inputs] float8_e4m3fn."""
    return (weight.float() / row_scales(weight)[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


class EightBitMethod:
    """Linear method of 8-bit weights, for any device."""

    def __init__(self, scheme: EightBitScheme) -> None:
        self.scheme = scheme

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        values, scales = empty_eight_bit(outputs, inputs, self.scheme, context.device)
        return EightBitLinear(values, scales, self.scheme, empty_bias(outputs, bias, context), context.kernels)


def empty_eight_bit(outputs: int, inputs: int, scheme: EightBitScheme, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate uninitialized values and scales; see `EightBitLinear`."""
    _, dtype = _DTYPES[scheme.kind]
    values = torch.empty(outputs, inputs, device=device, dtype=dtype)
    if scheme.block is None:
        return values, torch.empty(outputs, device=device)
    return values, torch.empty(ceil_div(outputs, SCALE_ROWS), ceil_div(inputs, SCALE_COLUMNS), device=device)
