"""Activations quantized to 8 bits, with their scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.integers import ceil_div

FP8_MAX = 448.0
"""Largest finite value of float8 e4m3."""
INT8_MAX = 127.0
KNOWN, WHOLE = -1, 0
"""Values of the kernels' GROUP other than a group size: a static scale is given, or each row has one scale."""


def quantizes_in_tiles(group: int, columns: int) -> bool:
    """Return whether programs can quantize tiles of columns independently.

    True with a static scale, with precomputed row maxima, and if each group is one tile. group: as in the kernels.
    """
    return group in (columns, KNOWN, WHOLE)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationFormat:
    """How a matmul's activations are quantized."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    group: int | None = None
    """Group size: number of consecutive inputs of a row that share a scale. None: one scale per row."""
    scale: Tensor | None = None
    """Static scale, [1] float32. None: scales are dynamic, computed per row or group."""

    @property
    def top(self) -> float:
        """Largest finite value of the dtype."""
        return INT8_MAX if self.dtype == torch.int8 else FP8_MAX

    def equals(self, other: "ActivationFormat") -> bool:
        """Return whether another format gives the same values. Static scales are the same if they share memory."""
        return (self.dtype, self.group) == (other.dtype, other.group) and self.scale is other.scale


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedActivation:
    """Quantized rows; the dequantized activation is values * scales.

    With group scales, rows are padded to a multiple of four, which library GEMMs require. The contents of padding are
    undefined.
    """

    values: Tensor
    """[padded rows, inputs], contiguous, in the format's dtype."""
    scales: Tensor
    """float32 scales: [rows, 1]; [padded rows, groups] with column-major strides; or [1] if static."""
    count: int
    """Number of rows without padding."""
    dtype: torch.dtype
    """Dtype before quantization, and of matmul outputs."""

    def dequantize(self) -> Tensor:
        """Return the dequantized rows, [rows, inputs] float32."""
        values, scales = self.values.float(), self.scales
        if scales.ndim == 2 and scales.shape[1] > 1:
            scales = scales.repeat_interleave(ceil_div(values.shape[1], scales.shape[1]), 1)
        return (values * scales)[: self.count]


def empty_quantized_activation(
    count: int, inputs: int, dtype: torch.dtype, of: ActivationFormat, device: torch.device
) -> QuantizedActivation:
    """Allocate uninitialized rows.

    dtype: before quantization. Raises ValueError if the group size does not divide the inputs.
    """
    if of.group is None:
        scales = torch.empty(count, 1, device=device) if of.scale is None else of.scale
        return QuantizedActivation(torch.empty(count, inputs, device=device, dtype=of.dtype), scales, count, dtype)
    if inputs % of.group:
        raise ValueError(f"{inputs} inputs do not divide into groups of {of.group}")
    padded = ceil_div(count, 4) * 4
    scales = torch.empty(inputs // of.group, padded, device=device).t()
    return QuantizedActivation(torch.empty(padded, inputs, device=device, dtype=of.dtype), scales, count, dtype)
