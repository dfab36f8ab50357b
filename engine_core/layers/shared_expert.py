"""Shared expert of a mixture: a network that all tokens use, weighted by a gate (Qwen 2 MoE, Qwen3-Next, Qwen 3.5).

Only of another width or format than the other experts; `MixtureOfExperts.build` stores it with them otherwise.
"""

from typing import Self

import torch
from torch import Tensor

from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.moe.routing import SharedOutput
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig

SHARED_MODULE = "shared_expert"
"""Name of the expert in its mixture."""


class SharedExpert:
    """A gated feed-forward network times sigmoid(gate(x)), one number for each token."""

    def __init__(self, network: GatedMLP, gate: Tensor) -> None:
        """Store the parts. gate: weight of the gate, [1, hidden], in the model's dtype or float32."""
        self.network = network
        self.gate = gate

    @classmethod
    def build(cls, config: ModelConfig, width: int, prefix: str, context: BuildContext) -> Self:
        """Allocate an expert with uninitialized weights.

        width: inputs of its down projection; prefix: of the mixture, such as "model.layers.0.mlp.".
        """
        dtype = context.own_dtype(f"{prefix}{SHARED_MODULE}_gate.weight")
        gate = torch.empty(1, config.hidden_size, device=context.device, dtype=dtype)
        return cls(GatedMLP.build(config, f"{prefix}{SHARED_MODULE}.", context, width), gate)

    def run(
        self,
        x: Tensor,
        adapters: AdapterTokens | None,
        quantized: QuantizedActivation | None = None,
        to: ActivationFormat | None = None,
    ) -> SharedOutput:
        """Return the expert's output.

        x: inputs of all experts, [T, hidden]; quantized: x in the format `to`, which is used if it is this expert's.
        """
        own = self.network.gate_up.input_format(len(x))
        fits = own is not None and to is not None and own.equals(to) and adapters is None
        return SharedOutput(self.network.apply(x, adapters, quantized if fits else None), x, self.gate)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors. prefix: as in `build`."""
        return [
            *self.network.slots(f"{prefix}{SHARED_MODULE}."),
            WeightSlot.whole(f"{prefix}{SHARED_MODULE}_gate.weight", self.gate),
        ]
