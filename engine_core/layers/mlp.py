"""Gated feed-forward network of one layer."""

import torch
from torch import Tensor

from engine_core.kernels.reference import silu_mul
from engine_core.layers.linear import Linear, LinearMethod
from engine_core.loader.slots import WeightSlot
from engine_core.models.config import ModelConfig


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up in one projection."""

    def __init__(self, gate_up: Linear, down: Linear, width: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.width = width

    @classmethod
    def build(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, method: LinearMethod) -> "GatedMLP":
        """Unfilled."""
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        gate_up = Linear.build(2 * width, hidden, bias, device, dtype, method)
        return cls(gate_up, Linear.build(hidden, width, bias, device, dtype, method), width)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x)))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Where checkpoint tensors go, under the names of Hugging Face's Llama."""
        parts = {"gate_proj": self.width, "up_proj": self.width}
        return self.gate_up.slots(prefix, "gate_up_proj", parts) | self.down.slots(prefix, "down_proj")
