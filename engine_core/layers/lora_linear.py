"""Linear layers with adapters: LoRA (Hu et al., 2021).

The memory of adapters is allocated with the model: each slot has room for one adapter of the maximum rank on every
linear layer. Slot 0 is the base, the model without an adapter, and has no memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.unfused_linear import UnfusedLinear
from tandem.engine_core.loader.slots import WeightSlot


@dataclass(frozen=True, slots=True)
class LayerUpdate:
    """Low-rank updates of one linear layer by one adapter, in host memory, in the model's dtype."""

    a: Tensor
    """[P, r, inputs]; rows from the rank of a part on are zeros."""
    b: Tensor
    """[r, outputs], multiplied by the scale."""
    ranks: Tensor
    """[P] int32, rank of each part, 0 for one that the adapter does not change."""

    def copied_to(self, buffer: Tensor) -> "LayerUpdate":
        """Return a copy in a buffer of bytes, which has room for it."""
        start, copies = 0, []
        for tensor in (self.ranks, self.a, self.b):
            copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor))
            start += tensor.nbytes
        ranks, a, b = copies
        return LayerUpdate(a, b, ranks)


class LoraLinear:
    """A linear layer, and the adapters of all slots for it.

    Steps without adapters use the layer as it is, with everything that it fuses.
    """

    def __init__(
        self,
        base: LinearWeights,
        inputs: int,
        parts: Mapping[str, int],
        max_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        kernels: KernelSet,
        stored_order: Tensor | None = None,
    ) -> None:
        """Allocate the memory of the adapters.

        base: the layer without an adapter; parts: number of outputs of each part of a fused projection by its name, the
        layer's own name for one that is not fused; stored_order: as `output_order`, of a layer with outputs in an order
        of its own.
        """
        self.base = base
        self.inputs = inputs
        self.parts = parts
        self.starts = tuple(accumulate(parts.values(), initial=0))
        self.kernels = kernels
        self.stored_order = stored_order
        self.a = torch.zeros(max_slots, len(parts), max_rank, inputs, device=device, dtype=dtype)
        """See `kernels.reference.lora.add_lora`, as for `b` and `ranks`."""
        self.b = torch.zeros(max_slots, max_rank, self.starts[-1], device=device, dtype=dtype)
        self.ranks = torch.zeros(max_slots + 1, len(parts), device=device, dtype=torch.int32)
        self.producer: LinearWeights | None = None
        """The layer with outputs that may be sorted for this one (`reorder_producer`)."""

    @property
    def input_order(self) -> Tensor | None:
        """Order of the inputs, [inputs] int64, by indices of the checkpoint's order; None: as in the checkpoint."""
        return None if self.producer is None else self.producer.gated_order

    @property
    def output_order(self) -> Tensor | None:
        """Order of the outputs, [outputs] int64, as `input_order`."""
        order = self.base.gated_order  # Of either half.
        return self.stored_order if order is None else torch.cat((order, order + len(order)))

    def fill(self, slot: int, update: LayerUpdate | None) -> None:
        """Copy an adapter into a slot; None: the adapter does not change this layer.

        No step in flight may use the slot.
        """
        if update is None:
            self.ranks[slot].zero_()
            return
        rank = update.b.shape[0]
        for part in range(len(self.parts)):
            self.a[slot - 1, part, :rank].copy_(update.a[part], non_blocking=True)
        self.b[slot - 1, :rank].copy_(update.b, non_blocking=True)
        self.ranks[slot].copy_(update.ranks, non_blocking=True)

    def adapted(self, adapters: AdapterTokens | None) -> LinearWeights:
        """Implement `LinearWeights.adapted`."""
        return self.base if adapters is None else AdaptedLinear(self, adapters)

    @property
    def gated_order(self) -> Tensor | None:
        """Implement `LinearWeights.gated_order`."""
        return self.base.gated_order

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`, without adapters."""
        return self.base.apply(x, out)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `LinearWeights.apply_gated`, without adapters."""
        return self.base.apply_gated(x, activation)

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`, without adapters."""
        return self.base.apply_normed(x, residual, norm, activation)

    def apply_normed_quantized(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `LinearWeights.apply_normed_quantized`, without adapters."""
        return self.base.apply_normed_quantized(x, residual, norm, activation, to)

    def apply_updated(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, activation: Activation | None, lora: LoraUpdates
    ) -> tuple[Tensor, Tensor] | None:
        """Implement `LinearWeights.apply_updated`."""
        return self.base.apply_updated(x, residual, norm, activation, lora)

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Implement `LinearWeights.input_format`, without adapters."""
        return self.base.input_format(rows)

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Implement `LinearWeights.apply_quantized`, without adapters."""
        return self.base.apply_quantized(x)

    def reorder_producer(self, source: LinearWeights) -> None:
        """Implement `LinearWeights.reorder_producer`."""
        self.producer = source.base if isinstance(source, LoraLinear) else source
        self.base.reorder_producer(self.producer)

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """Implement `LinearWeights.slots`."""
        return self.base.slots(prefix, name, parts)

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`."""
        return self.base.embedding_table()


class AdaptedLinear(UnfusedLinear):
    """A linear layer with the adapters of one step's tokens.

    Adapters read the normalised inputs in the model's dtype, whatever the format of the weights, and their updates are
    added before a gated activation. So norm, matmul, update and activation are separate launches.
    """

    def __init__(self, linear: LoraLinear, tokens: AdapterTokens) -> None:
        super().__init__(None, linear.kernels)
        self.linear = linear
        self.lora = LoraUpdates(tokens, linear.a, linear.b, linear.ranks, linear.starts)

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        updated = None if out is not None else self.linear.base.apply_updated(x, None, None, None, self.lora)
        if updated is not None:
            return updated[0]
        lora, y = self.lora, self.linear.base.apply(x, out)
        return self.kernels.add_lora(y, x, lora.tokens, lora.a, lora.b, lora.ranks, lora.starts)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `LinearWeights.apply_gated`."""
        updated = self.linear.base.apply_updated(x, None, None, activation, self.lora)
        return super().apply_gated(x, activation) if updated is None else updated[0]

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`."""
        updated = self.linear.base.apply_updated(x, residual, norm, activation, self.lora)
        return super().apply_normed(x, residual, norm, activation) if updated is None else updated

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`: those of the layer without an adapter."""
        return self.linear.slots(prefix, name, parts)

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`."""
        return self.linear.embedding_table()


class LoraSlots:
    """The slots of adapters of a model, over all its linear layers."""

    def __init__(self, max_slots: int, max_rank: int, group_tokens: Callable[[Tensor, int], AdapterTokens]) -> None:
        """Start without layers; `BuildContext.linear` adds them. group_tokens: as in `KernelSet`."""
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.group_tokens = group_tokens
        self.linears: dict[str, LoraLinear] = {}
        """Linear layers by their name in the text model, such as "model.layers.3.self_attn.qkv_proj"."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory of all slots."""
        return sum(linear.a.nbytes + linear.b.nbytes for linear in self.linears.values())

    def wrap(
        self,
        name: str,
        base: LinearWeights,
        inputs: int,
        parts: Mapping[str, int],
        device: torch.device,
        dtype: torch.dtype,
        kernels: KernelSet,
        stored_order: Tensor | None = None,
    ) -> LoraLinear:
        """Return a layer with memory for adapters. Arguments are as in `LoraLinear`."""
        given = base, inputs, parts, self.max_slots, self.max_rank, device, dtype, kernels, stored_order
        self.linears[name] = LoraLinear(*given)
        return self.linears[name]

    @property
    def max_update_bytes(self) -> int:
        """Most bytes of the update of one layer."""
        found = self.linears.values()
        return max((linear.a[0].nbytes + linear.b[0].nbytes + linear.ranks[0].nbytes for linear in found), default=0)

    def fill(self, slot: int, updates: Mapping[str, LayerUpdate]) -> None:
        """Copy an adapter into a slot. updates: of the layers that it changes, by name."""
        for name, linear in self.linears.items():
            linear.fill(slot, updates.get(name))
