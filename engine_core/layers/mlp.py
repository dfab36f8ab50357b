"""Gated feed-forward network of one layer."""

from typing import Self

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig


class GatedMLP:
    """Gated feed-forward network, with gate and up in one projection.

    Computes down(activation(gate(x)) * up(x)).
    """

    def __init__(
        self, gate_up: LinearWeights, down: LinearWeights, width: int, activation: Activation, kernels: KernelSet
    ) -> None:
        """Store the parts of a network.

        width: number of inputs of `down`, half the outputs of `gate_up`.
        """
        self.gate_up = gate_up
        self.down = down
        self.width = width
        self.activation = activation
        self.kernels = kernels

    @classmethod
    def build(cls, config: ModelConfig, prefix: str, context: BuildContext, width: int | None = None) -> Self:
        """Allocate a network with uninitialized weights.

        prefix: of the names of its linear layers, such as "model.layers.0.mlp."; width: inputs of its down projection,
        None for `intermediate_size`.
        """
        width, hidden, bias = width or config.intermediate_size, config.hidden_size, config.mlp_bias
        gate_up = context.linear(f"{prefix}gate_up_proj", 2 * width, hidden, bias, _parts(width))
        down = context.linear(f"{prefix}down_proj", hidden, width, bias)
        down.reorder_producer(gate_up)
        return cls(gate_up, down, width, config.activation, context.kernels)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        norm: Norm,
        rows: Tensor | None = None,
        adapters: AdapterTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the next update and the residual stream, both [T, hidden].

        update, residual: [T, hidden], see `LinearWeights.apply_normed`; norm: the norm before this network; rows,
        adapters: as in `ForwardBatch`; rows are not used: padding is computed like other tokens.
        """
        gate_up, down = self.gate_up.adapted(adapters), self.down.adapted(adapters)
        to = down.input_format(update.shape[0])
        if to is None:
            hidden, residual = gate_up.apply_normed(update, residual, norm, self.activation)
            return down.apply(hidden), residual
        quantized, residual = gate_up.apply_normed_quantized(update, residual, norm, self.activation, to)
        return down.apply_quantized(quantized), residual

    def apply(self, x: Tensor, adapters: AdapterTokens | None, quantized: QuantizedActivation | None = None) -> Tensor:
        """Return the network of x, both [T, hidden]: without a norm before it.

        quantized: x in the input format of the first projection, if it is known; without adapters.
        """
        gate_up, down = self.gate_up.adapted(adapters), self.down.adapted(adapters)
        to = down.input_format(x.shape[0])
        if to is None:
            return down.apply(gate_up.apply_gated(x, self.activation))
        both = gate_up.apply(x) if quantized is None else gate_up.apply_quantized(quantized)
        return down.apply_quantized(self.kernels.quantized_gate(both, self.activation, to))

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        Names are those of Hugging Face's Llama.
        """
        gate_up = self.gate_up.slots(prefix, "gate_up_proj", _parts(self.width))
        return gate_up + self.down.slots(prefix, "down_proj")


def _parts(width: int) -> dict[str, int]:
    """Return the outputs of each part of the first projection."""
    return {"gate_proj": width, "up_proj": width}
