"""Interface of the weights of a layer's experts."""

from typing import Protocol

from torch import Tensor

from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.loader.slots import WeightSlot


class ExpertWeights(Protocol):
    """The experts of one layer: gated feed-forward networks. Each token uses a few of them."""

    def needs_sorted(self, tokens: int, top_k: int) -> bool:
        """Return whether `run` needs pairs sorted by expert. top_k: experts of each token."""

    def input_format(self, tokens: int, top_k: int) -> ActivationFormat | None:
        """Return the format in which `run` multiplies x, None for x's dtype. top_k: experts of each token."""

    def run(
        self,
        x: Tensor,
        routed: Routed,
        shared: SharedOutput | None = None,
        quantized: QuantizedActivation | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden]; zeros for padding.

        x: [T, hidden], contiguous; shared: of the expert that all tokens use, added to the sum, None if there is none;
        quantized: x in `input_format`, None if that is None.
        """

    def slots(self, prefix: str, projections: tuple[str, str, str], shared: str = "") -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        A checkpoint has three tensors for each expert, such as `experts.0.gate_proj.weight`, or two of three dimensions
        for all of them, `experts.gate_up_proj` with the gate's rows first, and `experts.down_proj`. prefix: ends with a
        dot; projections: names of an expert's gate, up and down projections; shared: name of the last expert, if it has
        tensors of its own in both cases, such as "shared_expert"; empty: it has not.
        """


def expert_names(count: int, shared: str = "") -> list[str]:
    """Return the names of `count` experts in a mixture's module. shared: of the last one, if it differs."""
    names = [f"experts.{expert}" for expert in range(count)]
    return [*names[:-1], shared] if shared else names
