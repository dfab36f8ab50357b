"""Gated feed-forward network of one layer."""

from torch import Tensor

from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import Linear
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up in one projection."""

    def __init__(self, gate_up: Linear, down: Linear, width: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.width = width

    @classmethod
    def build(cls, config: ModelConfig, context: BuildContext) -> "GatedMLP":
        """Unfilled."""
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        gate_up = Linear.build(2 * width, hidden, bias, context)
        return cls(gate_up, Linear.build(hidden, width, bias, context), width)

    def __call__(self, update: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """update, residual: [T, hidden], as in `Linear.normed`. Returns the next update and the stream."""
        hidden, residual = self.gate_up.normed(update, residual, norm, gated=True)
        return self.down(hidden), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Where checkpoint tensors go, under the names of Hugging Face's Llama."""
        parts = {"gate_proj": self.width, "up_proj": self.width}
        return self.gate_up.slots(prefix, "gate_up_proj", parts) | self.down.slots(prefix, "down_proj")
