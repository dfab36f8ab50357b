"""Weights whose groups of inputs share a scale, with or without act-order."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.quantized_linear import QuantizedLinear, part_slices
from tandem.engine_core.loader.slots import WeightSlot

_COLUMNS = 64
"""Columns whose outputs are sorted at a time, to limit the memory of copies."""


class GroupedLinear(QuantizedLinear):
    """Weights with a scale per output and group of inputs.

    With act-order the weights are sorted by group after loading. The inputs are permuted likewise in each call, by the
    norm before the matmul if there is one, or, after a gate, by sorting the outputs of the layer that computes them.
    """

    def __init__(
        self, scales: Tensor, inputs: int, group_name: str, ordered: bool, bias: Tensor | None, kernels: KernelSet
    ) -> None:
        """Store the parts that do not depend on the number of bits.

        scales: [outputs, groups] float32; group_name: last component of the name of the checkpoint's tensor with the
        group of each input; ordered: whether a checkpoint must have it.
        """
        super().__init__(bias, kernels)
        self.scales = scales
        self.inputs = inputs
        self.group_name = group_name
        self.ordered_groups = ordered
        self.order: Tensor | None = None
        """Inputs sorted by group, [inputs] int32; None: identity."""
        self.source: GroupedLinear | None = None
        """The layer whose gated output is this layer's input; None: there is none whose outputs can be sorted."""
        self._gated_order: Tensor | None = None
        self._is_filled = False

    @abstractmethod
    def sort_inputs(self, order: Tensor) -> None:
        """Sort the inputs of the stored weights in place.

        order: [inputs] int64.
        """

    @abstractmethod
    def output_tables(self) -> list[Tensor]:
        """Return the tensors with a row per output, besides the bias."""

    @abstractmethod
    def part_slots(self, projection: str, start: int, length: int) -> list[WeightSlot]:
        """List the slots of a part of the projection, without that of the groups of inputs."""

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

    @property
    def gated_order(self) -> Tensor | None:
        """Implement `LinearWeights.gated_order`."""
        return self._gated_order

    def reorder_producer(self, source: LinearWeights) -> None:
        """Implement `LinearWeights.reorder_producer`."""
        self.source = source if isinstance(source, GroupedLinear) else None

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`."""
        outputs, count = self.scales.shape[0], len(parts or {}) or 1
        groups = self._usual_groups().repeat(count, 1)
        sort = partial(self.sort, groups, f"{prefix}{name}")
        slots = []
        for index, (projection, start, length) in enumerate(part_slices(prefix, name, parts, outputs)):
            slots += self.part_slots(projection, start, length)
            is_whole = (start, length) == (0, outputs)
            first, rows = (0, count) if is_whole else (index, 1)
            slots.append(
                WeightSlot(
                    f"{projection}.{self.group_name}",
                    groups,
                    0,
                    first,
                    rows,
                    transform=partial(self._checked_groups, f"{projection}.{self.group_name}", rows),
                    dtypes=("I32", "I64"),
                    shapes=((self.inputs,),),
                    is_optional=not self.ordered_groups,
                    on_filled=sort,
                )
            )
        return slots

    def sort(self, groups: Tensor, name: str) -> None:
        """Sort the weights by group, after loading.

        groups: group of each input in each part of a fused projection, [parts, inputs] int32; name: of the projection,
        for errors. Raises ConfigError if the parts differ in their groups.
        """
        first = groups[0]
        if (groups != first).any():
            raise ConfigError(
                f"{name}: its parts have inputs in different groups (g_idx) and cannot be fused; quantize the model "
                "again with one order for all layers that share an input, as GPTQ tools do"
            )
        order = first.argsort(stable=True)
        is_usual = torch.equal(order, torch.arange(len(order), device=order.device))
        held = self.order if self.source is None else self.source.gated_order
        if held is None and self._is_filled and not is_usual:
            raise ConfigError(f"{name}: g_idx has an order, that of the weights before had none; restart")
        self._is_filled = True
        if held is None and is_usual:
            return
        if self.source is not None:
            self.source.sort_gated(order)
        elif held is None:
            self.order = order.int()
        else:
            held.copy_(order)  # CUDA graphs may hold it.
        self.sort_inputs(order)

    def _checked_groups(self, name: str, count: int, stored: Tensor) -> Tensor:
        """Return the group of each input for a number of parts, [count, inputs].

        name: of the tensor, for errors. Raises ConfigError if a group is invalid or differs in size from the others.
        """
        num_groups = self.scales.shape[1]
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= num_groups:
            raise ConfigError(f"{name} must have values from 0 to {num_groups - 1}, not from {low} to {high}")
        sizes = torch.bincount(stored.long(), minlength=num_groups)
        if (sizes != self.group_size).any():
            raise ConfigError(
                f"{name} must put {self.group_size} inputs into each of {num_groups} groups, but its values are from "
                f"{low} to {high} with up to {int(sizes.max())} inputs each"
            )
        return stored.expand(count, -1)

    def sort_gated(self, order: Tensor) -> None:
        """Sort the outputs, gate and up, in place.

        order: output indices within either half, [outputs / 2] int64.
        """
        if self._gated_order is None:
            self._gated_order = order
        else:
            self._gated_order.copy_(order)
        rows = torch.cat((order, order + len(order)))
        for part in (*self.output_tables(), self.bias):
            if part is not None:
                table = part.view(len(rows), -1)
                for start in range(0, table.shape[1], _COLUMNS):
                    columns = table[:, start : start + _COLUMNS]
                    columns.copy_(columns[rows])

    @property
    def group_size(self) -> int:
        """Group size: number of inputs."""
        return self.inputs // self.scales.shape[1]

    def _usual_groups(self) -> Tensor:
        """Return the group of each input for consecutive groups, [inputs] int32."""
        return torch.arange(self.inputs, device=self.scales.device, dtype=torch.int32) // self.group_size
