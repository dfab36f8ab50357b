"""Fused projection of parts in different storage formats."""

from collections.abc import Mapping

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

    def __init__(self, parts: Mapping[str, LinearWeights], kernels: KernelSet) -> None:
        """Store the parts by name, in order; each has its own bias, if any."""
        super().__init__(None, kernels)
        self.parts = parts

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        return torch.cat([part.apply(x) for part in self.parts.values()], dim=1, out=out)

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`: those of each part; a checkpoint cannot hold the whole."""
        return [slot for part, linear in self.parts.items() for slot in linear.slots(prefix, part)]

    def embedding_table(self) -> Tensor:
        """Implement `LinearWeights.embedding_table`: an output head has no parts."""
        raise ConfigError("the output head has parts in different formats, but shares its weights with the embedding")
