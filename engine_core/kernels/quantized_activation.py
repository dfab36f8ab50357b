"""Inputs of a product in one byte, with their scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.integers import ceil_div

FP8_MAX = 448.0
"""Largest number of float8 e4m3."""
INT8_MAX = 127.0
KNOWN, WHOLE = -1, 0
"""Values of the kernels' GROUP beside a number of inputs: the scale is given, or the whole row shares one."""


def quantizes_in_tiles(group: int, columns: int) -> bool:
    """Return whether tiles of a number of columns suffice for rounding.

    They do with a known scale, with a scale for each row by their largest numbers, and with groups that are tiles.
    group: as in the kernels.
    """
    return group in (columns, KNOWN, WHOLE)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationFormat:
    """The way in which a product takes its inputs in one byte."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    group: int | None = None
    """Number of consecutive inputs of a row that share a scale; None: all of them do."""
    scale: Tensor | None = None
    """Scale of all inputs, [1] float32, known beforehand; None: scales are found for each row."""

    @property
    def top(self) -> float:
        """Largest number that the dtype holds."""
        return INT8_MAX if self.dtype == torch.int8 else FP8_MAX


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedActivation:
    """Rows of one byte an element, whose numbers are values * scales.

    Rows with scales of groups are padded to a multiple of four, as libraries want them; what the padding holds is
    undefined.
    """

    values: Tensor
    """[padded rows, inputs], contiguous, in the format's dtype."""
    scales: Tensor
    """Float32: [rows, 1]; of groups [padded rows, groups], those of one group contiguous; or [1] for all."""
    count: int
    """Number of rows without padding."""
    dtype: torch.dtype
    """Dtype of the numbers before they were rounded, and of products with them."""

    def numbers(self) -> Tensor:
        """Return the numbers that the rows stand for, [rows, inputs] float32."""
        values, scales = self.values.float(), self.scales
        if scales.ndim == 2 and scales.shape[1] > 1:
            scales = scales.repeat_interleave(ceil_div(values.shape[1], scales.shape[1]), 1)
        return (values * scales)[: self.count]


def empty_quantized_activation(
    count: int, inputs: int, dtype: torch.dtype, of: ActivationFormat, device: torch.device
) -> QuantizedActivation:
    """Allocate rows that are not filled yet.

    dtype: of the numbers before they are rounded. Raises ValueError if groups do not divide the inputs.
    """
    if of.group is None:
        scales = torch.empty(count, 1, device=device) if of.scale is None else of.scale
        return QuantizedActivation(torch.empty(count, inputs, device=device, dtype=of.dtype), scales, count, dtype)
    if inputs % of.group:
        raise ValueError(f"{inputs} inputs do not divide into groups of {of.group}")
    padded = ceil_div(count, 4) * 4
    scales = torch.empty(inputs // of.group, padded, device=device).t()
    return QuantizedActivation(torch.empty(padded, inputs, device=device, dtype=of.dtype), scales, count, dtype)
