"""Fused projection of parts in different storage formats."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.unfused_linear import UnfusedLinear
from tandem.engine_core.loader.slots import WeightSlot


class SplitLinear(UnfusedLinear):
    """Linear layers with the same inputs, which run one by one.

    Used in place of a fused projection if its parts have different storage formats.
    """

    def __init__(self, linears: Sequence[tuple[Mapping[str, int], LinearWeights]], kernels: KernelSet) -> None:
        """Store the linear layers in the order of their outputs, each with its own bias, if any.

        linears: numbers of outputs of consecutive parts in one format, by name, and the weights that these parts share.
        """
        super().__init__(None, kernels)
        self.linears = linears

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        return torch.cat([linear.apply(x) for _, linear in self.linears], dim=1, out=out)

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`: those of each part; a checkpoint cannot hold the whole.

        parts: those of the linear layers, or pieces of them.
        """
        slots: list[WeightSlot] = []
        pieces = list((parts or {}).items())[::-1]
        for own, linear in self.linears:
            found: dict[str, int] = {}
            while pieces and sum(found.values()) < sum(own.values()):
                name, outputs = pieces.pop()
                found[name] = outputs
            found = found or dict(own)
            slots += linear.slots(prefix, "+".join(found), found if len(found) > 1 else None)
        return slots

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`: an output head has no parts."""
        raise ConfigError("the output head has parts in different formats, but shares its weights with the embedding")
