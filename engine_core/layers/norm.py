"""Root mean square norm over the residual stream."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.loader.slots import WeightSlot


class RMSNorm:
    """See `kernels.reference.rms_norm`."""

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet) -> None:
        """weight: [hidden]."""
        self.weight = weight
        self.eps = eps
        self.kernels = kernels

    @classmethod
    def build(cls, hidden: int, eps: float, context: BuildContext) -> "RMSNorm":
        """Unfilled."""
        return cls(torch.empty(hidden, device=context.device, dtype=context.dtype), eps, context.kernels)

    def __call__(self, update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the update to the residual stream (None: the update starts it). Both [T, hidden].

        Returns the normalised stream and the stream.
        """
        if residual is None:
            return self.kernels.rms_norm(update, self.weight, self.eps), update
        return self.kernels.add_rms_norm(update, residual, self.weight, self.eps)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        """Where the checkpoint tensor goes."""
        return {f"{name}.weight": WeightSlot(self.weight, 0, self.weight.shape[0])}
