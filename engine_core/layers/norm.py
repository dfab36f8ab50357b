"""RMSNorm over the residual stream."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.loader.slots import WeightSlot


class RMSNorm:
    """RMSNorm with an elementwise weight.

    See `kernels.reference.layer.rms_norm` for the arithmetic. Some families (Gemma) store weight - 1. One is added when
    a checkpoint is loaded, in float32, so kernels need no special case.
    """

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet, unit_offset: bool = False) -> None:
        """Store the parameters.

        weight: [hidden]; unit_offset: True if the checkpoint stores weight - 1.
        """
        self.weight = weight
        self.update_weight: Tensor | None = None
        self.eps = eps
        self.kernels = kernels
        self.unit_offset = unit_offset

    @classmethod
    def build(cls, hidden: int, eps: float, context: BuildContext, unit_offset: bool = False) -> "RMSNorm":
        """Allocate a norm with an uninitialized weight."""
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
    """A norm of the update, followed by a norm of the residual stream.

    Gemma 2 and 3 have both around every block (Gemma Team, 2024): the output of attention or a feed-forward network is
    normalized and added to the stream, and the stream is normalized for the next block.
    """

    def __init__(self, update_norm: RMSNorm, norm: RMSNorm) -> None:
        """Store two norms with one eps.

        update_norm: of the update; norm: of the stream.
        """
        assert update_norm.eps == norm.eps, f"norms of eps {update_norm.eps} and {norm.eps} cannot share a kernel"
        self.norm = norm
        self.weight = norm.weight
        self.update_weight: Tensor | None = update_norm.weight
        self.eps = norm.eps
        self.kernels = norm.kernels

    def __call__(self, update: Tensor, residual: Tensor | None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalize the update, add it to the residual stream and normalize the sum.

        Return the normalized stream and the stream, as in `Norm.__call__`.
        """
        assert residual is not None and self.update_weight is not None, "the first block has a plain norm before it"
        return self.kernels.norm_add_rms_norm(update, self.update_weight, residual, self.weight, self.eps, order)

    def quantized(
        self, update: Tensor, residual: Tensor | None, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `Norm.quantized`."""
        return self.kernels.quantized_norm(update, residual, self.update_weight, self.weight, self.eps, to)

    def slots(self, name: str) -> list[WeightSlot]:
        """List the slot of the stream's norm.

        The update's norm belongs to the previous block.
        """
        return self.norm.slots(name)


def _add_one(weight: Tensor) -> Tensor:
    return weight.float() + 1
