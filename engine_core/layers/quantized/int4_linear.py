"""Int4 linear weights, from GPTQ, AWQ and compressed-tensors, in one layout."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.quantized.grouped_linear import GroupedLinear
from tandem.engine_core.layers.quantized.int4_slots import int4_slots
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.int4 import PER_WORD, pack, unpack
from tandem.engine_core.quantization.scheme import Int4Scheme

ROWS = 1024
"""Outputs whose inputs are sorted at a time, to limit the memory of unpacked values."""


class Int4Linear(GroupedLinear):
    """Int4 weights with a scale and a zero point per output and group of inputs."""

    def __init__(
        self,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor,
        scheme: Int4Scheme,
        bias: Tensor | None,
        kernels: KernelSet,
    ) -> None:
        """Store the weights.

        words: [outputs, inputs / 8] int32, see `quantization.int4`; scales: [outputs, groups] float32; zeros: [outputs,
        groups] uint8; bias: [outputs]. They come from `empty_int4`.
        """
        name = "weight_g_idx" if scheme.packing == "compressed-tensors" else "g_idx"
        super().__init__(scales, words.shape[1] * PER_WORD, name, scheme.ordered, bias, kernels)
        self.words = words
        self.zeros = zeros
        self.scheme = scheme

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized`; the inputs are in `order`."""
        levels = unpack(self.words).to(torch.int16).view(*self.scales.shape, -1)
        return ((levels - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1).to(dtype)

    def part_slots(self, projection: str, start: int, length: int) -> list[WeightSlot]:
        """Implement `GroupedLinear.part_slots`."""
        return int4_slots(projection, start, length, self.words, self.scales, self.zeros, self.scheme)

    def sort_inputs(self, order: Tensor) -> None:
        """Implement `GroupedLinear.sort_inputs`."""
        for start in range(0, self.words.shape[0], ROWS):
            rows = self.words[start : start + ROWS]
            rows.copy_(pack(unpack(rows)[:, order]))

    def output_tables(self) -> list[Tensor]:
        """Implement `GroupedLinear.output_tables`."""
        return [self.words, self.scales, self.zeros]


class Int4Method:
    """Linear method of int4 weights, for any device."""

    def __init__(self, scheme: Int4Scheme) -> None:
        self.scheme = scheme

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`.

        Raises ConfigError for a shape that words and groups do not divide.
        """
        words, scales, zeros = empty_int4(outputs, inputs, self.scheme, context.device)
        return Int4Linear(words, scales, zeros, self.scheme, empty_bias(outputs, bias, context), context.kernels)


def empty_int4(outputs: int, inputs: int, scheme: Int4Scheme, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate words, scales and zero points; see `Int4Linear`.

    Zero points are initialized to 8, the value of symmetric checkpoints without them. Scales and zero points are
    column-major, as kernels read those of many outputs at once.
    """
    group = scheme.group or inputs
    if outputs % PER_WORD or inputs % PER_WORD or inputs % group:
        raise unsupported(
            f"the projection has {inputs} inputs and {outputs} outputs; int4 weights need multiples of {PER_WORD}, and "
            f"inputs in groups of {group}"
        )
    words = torch.empty(outputs, inputs // PER_WORD, device=device, dtype=torch.int32)
    scales = torch.empty(inputs // group, outputs, device=device)
    zeros = torch.full(scales.shape, 8, device=device, dtype=torch.uint8)
    return words, scales.t(), zeros.t()
