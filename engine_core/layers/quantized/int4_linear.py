"""Int4 linear weights, from GPTQ, AWQ and compressed-tensors, in one layout."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.int4_slots import int4_slots
from tandem.engine_core.layers.quantized.quantized_linear import QuantizedLinear, part_slices
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.int4 import PER_WORD, pack, unpack
from tandem.engine_core.quantization.scheme import Int4Scheme

ROWS = 1024
"""Outputs whose inputs are sorted at a time, to limit the memory of unpacked values."""
_COLUMNS = 64
"""Words whose outputs are sorted at a time, to limit the memory of copies."""


class Int4Linear(QuantizedLinear):
    """Int4 weights with a scale and a zero point per output and group of inputs.

    With act-order the weights are sorted by group after loading. The inputs are permuted likewise in each call, by the
    norm before the matmul if there is one, or, after a gate, by sorting the outputs of the layer that computes them.
    """

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
        super().__init__(bias, kernels)
        self.words = words
        self.scales = scales
        self.zeros = zeros
        self.scheme = scheme
        self.order: Tensor | None = None
        """Inputs sorted by group, [inputs] int32; None: identity."""
        self.source: Int4Linear | None = None
        """The layer whose gated output is this layer's input; None: there is none whose outputs can be sorted."""

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        matmul = self.matmul(x, self.order)
        return matmul if out is None else out.copy_(matmul)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `UnfusedLinear.apply_gated`."""
        return self.gated_matmul(x, activation, self.order)

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`.

        The norm permutes the inputs to the order of the weights.
        """
        normed, stream = norm(x, residual, self.order)
        if activation is None:
            return self.matmul(normed, None), stream
        return self.gated_matmul(normed, activation, None), stream

    def matmul(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return the matmul of permuted inputs.

        order: `self.order`; None: inputs are in the order of the weights.
        """
        return super().apply(self.ordered(x, order))

    def gated_matmul(self, x: Tensor, activation: Activation, order: Tensor | None) -> Tensor:
        """Return the gated activation of `matmul`."""
        return self.kernels.gated_activation(self.matmul(x, order), activation)

    def ordered(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return permuted inputs, [T, inputs]; None: unchanged."""
        return x if order is None else self.kernels.gather_columns(x, order)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized`; the inputs are in `order`."""
        levels = unpack(self.words).to(torch.int16).view(*self.scales.shape, -1)
        return ((levels - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1).to(dtype)

    def reorder_producer(self, source: LinearWeights) -> None:
        """Implement `LinearWeights.reorder_producer`."""
        self.source = source if isinstance(source, Int4Linear) else None

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`."""
        count = len(parts or {}) or 1
        groups = self._usual_groups().repeat(count, 1)
        sort = partial(self.sort, groups, f"{prefix}{name}")
        slots = []
        for index, (projection, start, length) in enumerate(part_slices(prefix, name, parts, self.words.shape[0])):
            slots += int4_slots(projection, start, length, self.words, self.scales, self.zeros, self.scheme)
            is_whole = (start, length) == (0, self.words.shape[0])
            first, rows = (0, count) if is_whole else (index, 1)
            slots.append(replace(self._group_slot(projection, groups, first, rows), on_filled=sort))
        return slots

    def sort(self, groups: Tensor, name: str) -> None:
        """Sort the weights by group, after loading.

        groups: group of each input in each part of a fused projection, [parts, inputs] int32; name: of the projection,
        for errors. Raises ConfigError if the parts differ in their groups, and if a group is invalid or differs in size
        from the others.
        """
        first, count = groups[0], self.scales.shape[1]
        if groups.min() < 0 or groups.max() >= count:
            low, high = int(groups.min()), int(groups.max())
            raise ConfigError(f"{name}: g_idx must have values from 0 to {count - 1}, not from {low} to {high}")
        if (groups != first).any():
            raise ConfigError(
                f"{name}: its parts have inputs in different groups (g_idx) and cannot be fused; quantize the model "
                "again with one order for all layers that share an input, as GPTQ tools do"
            )
        order = first.argsort(stable=True)
        if not torch.equal(first[order], self._usual_groups()):
            sizes = torch.bincount(first.clamp(min=0).long())
            raise ConfigError(
                f"{name}: g_idx must put {self.group_size} inputs into each of {self.scales.shape[1]} groups, but its "
                f"values are from {int(first.min())} to {int(first.max())} with up to {int(sizes.max())} inputs each"
            )
        if torch.equal(order, torch.arange(len(order), device=order.device)):
            return
        if self.source is None:
            self.order = order.int()
        else:
            self.source.sort_gated(order)
        for start in range(0, self.words.shape[0], ROWS):
            rows = self.words[start : start + ROWS]
            rows.copy_(pack(unpack(rows)[:, order]))

    def sort_gated(self, order: Tensor) -> None:
        """Sort the outputs, gate and up, in place.

        order: output indices within either half, [outputs / 2] int64.
        """
        rows = torch.cat((order, order + len(order)))
        for part in (self.words, self.scales, self.zeros, self.bias):
            if part is not None:
                table = part.view(len(rows), -1)
                for start in range(0, table.shape[1], _COLUMNS):
                    columns = table[:, start : start + _COLUMNS]
                    columns.copy_(columns[rows])

    @property
    def group_size(self) -> int:
        """Group size: number of inputs."""
        return self.words.shape[1] * PER_WORD // self.scales.shape[1]

    def _usual_groups(self) -> Tensor:
        """Return the group of each input for consecutive groups, [inputs] int32."""
        inputs = torch.arange(self.words.shape[1] * PER_WORD, device=self.words.device, dtype=torch.int32)
        return inputs // self.group_size

    def _group_slot(self, projection: str, groups: Tensor, start: int, count: int) -> WeightSlot:
        """Return the slot of a tensor `g_idx`.

        It is optional without act-order.
        """
        name = "weight_g_idx" if self.scheme.packing == "compressed-tensors" else "g_idx"
        return WeightSlot(
            f"{projection}.{name}",
            groups,
            0,
            start,
            count,
            transform=lambda stored: stored.expand(count, -1),
            dtypes=("I32", "I64"),
            shapes=((groups.shape[1],),),
            is_optional=not self.scheme.ordered,
        )


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
            f"a projection has {inputs} inputs and {outputs} outputs; int4 weights need multiples of {PER_WORD}, and "
            f"inputs in groups of {group}"
        )
    words = torch.empty(outputs, inputs // PER_WORD, device=device, dtype=torch.int32)
    scales = torch.empty(inputs // group, outputs, device=device)
    zeros = torch.full(scales.shape, 8, device=device, dtype=torch.uint8)
    return words, scales.t(), zeros.t()
