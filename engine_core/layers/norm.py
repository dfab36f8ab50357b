"""Root mean square norm over the residual stream."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.loader.slots import WeightSlot


class RMSNorm:
    """A root mean square norm with a factor for each element.

    `kernels.reference.layer.rms_norm` defines the arithmetic. Some families (Gemma) store the difference of each factor
    from 1. One is added when a checkpoint is loaded, in float32, so that kernels need not know about it.
    """

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet, unit_offset: bool = False) -> None:
        """Keep the parts of a norm.

        weight: factors, [hidden]; unit_offset: True if the checkpoint stores factors less 1.
        """
        self.weight = weight
        self.update_weight: Tensor | None = None
        self.eps = eps
        self.kernels = kernels
        self.unit_offset = unit_offset

    @classmethod
    def build(cls, hidden: int, eps: float, context: BuildContext, unit_offset: bool = False) -> "RMSNorm":
        """Allocate a norm whose weight is not filled yet."""
        dtype = torch.float32 if unit_offset else context.dtype
        return cls(torch.empty(hidden, device=context.device, dtype=dtype), eps, context.kernels, unit_offset)

    def __call__(self, update: Tensor, residual: Tensor | None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Implement `Norm.__call__`."""
        if residual is None:
            return self.kernels.rms_norm(update, self.weight, self.eps, order), update
        return self.kernels.add_rms_norm(update, residual, self.weight, self.eps, order)

    def quantized(
        self, update: Tensor, residual: Tensor | None, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `Norm.quantized`."""
        return self.kernels.quantized_norm(update, residual, self.update_weight, self.weight, self.eps, to)

    def slots(self, name: str) -> list[WeightSlot]:
        """List the slot of the checkpoint's tensor."""
        return [WeightSlot.whole(f"{name}.weight", self.weight, transform=_add_one if self.unit_offset else None)]


class SandwichNorm:
    """A norm of the residual stream behind a norm of the update.

    Gemma 2 and 3 have both around every block (Gemma Team, 2024): what attention or a feed-forward network returns is
    normalised, added to the stream, and the stream is normalised for the next block.
    """

    def __init__(self, update_norm: RMSNorm, norm: RMSNorm) -> None:
        """Keep two norms with one eps.

        update_norm: that of the update; norm: that of the stream.
        """
        assert update_norm.eps == norm.eps, f"norms of eps {update_norm.eps} and {norm.eps} cannot share a kernel"
        self.norm = norm
        self.weight = norm.weight
        self.update_weight: Tensor | None = update_norm.weight
        self.eps = norm.eps
        self.kernels = norm.kernels

    def __call__(self, update: Tensor, residual: Tensor | None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalise the update, add it to the residual stream and normalise that.

        Return the normalised stream and the stream, as `Norm.__call__` does.
        """
        assert residual is not None and self.update_weight is not None, "the first block has a plain norm before it"
        return self.kernels.norm_add_rms_norm(update, self.update_weight, residual, self.weight, self.eps, order)

    def quantized(
        self, update: Tensor, residual: Tensor | None, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `Norm.quantized`."""
        return self.kernels.quantized_norm(update, residual, self.update_weight, self.weight, self.eps, to)

    def slots(self, name: str) -> list[WeightSlot]:
        """List the slot of the norm of the stream.

        That of the update belongs to the block before.
        """
        return self.norm.slots(name)


def _add_one(weight: Tensor) -> Tensor:
    return weight.float() + 1
