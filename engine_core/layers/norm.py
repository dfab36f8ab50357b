"""Root mean square norm over the residual stream."""

import torch
from torch import Tensor

from engine_core.kernels.reference import add_rms_norm, rms_norm
from engine_core.loader.slots import WeightSlot


class RMSNorm:
    """See `kernels.reference.rms_norm`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [hidden]."""
        self.weight = weight
        self.eps = eps

    @classmethod
    def build(cls, hidden: int, eps: float, device: torch.device, dtype: torch.dtype) -> "RMSNorm":
        """Unfilled."""
        return cls(torch.empty(hidden, device=device, dtype=dtype), eps)

    def __call__(self, update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the update to the residual stream (None: the update starts it). Both [T, hidden].

        Returns the normalised stream and the stream.
        """
        if residual is None:
            return rms_norm(update, self.weight, self.eps), update
        return add_rms_norm(update, residual, self.weight, self.eps)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        """Where the checkpoint tensor goes."""
        return {f"{name}.weight": WeightSlot(self.weight, 0, self.weight.shape[0])}
