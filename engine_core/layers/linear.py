"""Interface of linear layers.

Their weights own the storage, the checkpoint slots and the matmul.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.loader.slots import WeightSlot


class Norm(Protocol):
    """RMSNorm over the residual stream.

    A linear layer may fuse it with its matmul.
    """

    weight: Tensor
    """Weight of the norm, [hidden]."""
    update_weight: Tensor | None
    """Weight of a norm of the update before the addition, [hidden]; None: no such norm."""
    eps: float

    def __call__(self, update: Tensor, residual: Tensor | None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add the update to the residual stream (None: start it).

        Return the normalized stream and the stream, both [T, hidden]. order: permutation of the former's columns,
        [hidden] int32.
        """

    def quantized(
        self, update: Tensor, residual: Tensor | None, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Like `__call__`, but quantize the normalized stream to 8 bits."""


class LinearWeights(Protocol):
    """The weights of y = x W^T + b in one storage format.

    The norm before a projection and the gated activation after it are arguments, because some devices fuse them into
    one launch. A layer calls the result of `adapted`, which may compute them in separate launches.
    """

    def adapted(self, adapters: AdapterTokens | None) -> "LinearWeights":
        """Return the layer with the adapters of a step's tokens; itself if none of them changes it.

        The result takes inputs in the model's dtype: its `input_format` is None.
        """

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the matmul, [T, outputs].

        x: [T, inputs]; out: output tensor, contiguous.
        """

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up of the matmul, [T, outputs / 2]. The first half of the outputs is the gate."""

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, normalize it and multiply.

        Return the matmul and the stream. x, residual: [T, inputs]; residual None: x starts the stream. activation: the
        first half of the matmul is a gate, and activation(gate) * up, [T, outputs / 2], is returned instead.
        """

    def apply_normed_quantized(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Like `apply_normed` with an activation, but quantize the result.

        to: input format of the next matmul.
        """

    def apply_updated(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, activation: Activation | None, lora: LoraUpdates
    ) -> tuple[Tensor, Tensor] | None:
        """Like `apply_normed`, with updates of adapters added before the bias and the activation.

        norm: None multiplies x itself. Return None if no kernel of the layer adds updates to this matmul.
        """

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Return the input format of a matmul of a number of rows.

        None means the model's dtype. The preceding operation may write inputs in it, for `apply_quantized`; `apply`
        quantizes them itself.
        """

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Return the matmul of inputs in `input_format`, [T, outputs]."""

    def reorder_producer(self, source: "LinearWeights") -> None:
        """Register the layer whose gated output, activation(gate) * up, is this layer's input.

        Nothing else reads that output, so weights that need their inputs in another order may sort the other layer's
        outputs once both are loaded.
        """

    @property
    def gated_order(self) -> Tensor | None:
        """Order into which the layer sorted its outputs, gate and up, for `reorder_producer`.

        [outputs / 2] int64, indices of the checkpoint's outputs within either half; None: they are not sorted.
        """

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        They are `prefix + part` for each part (name and number of outputs, in order) of a fused projection, and `prefix
        + name` for the whole.
        """

    def embedding_table(self) -> Tensor:
        """Return the weights as one row per output, [outputs, inputs].

        The rows are in the model's dtype and share the weights' storage, for an embedding tied to an output head.
        Raises ConfigError if the format has no such rows.
        """


def projection_slots(
    parameter: Tensor, prefix: str, name: str, parts: Mapping[str, int] | None, kind: str, **fields: Any
) -> list[WeightSlot]:
    """List the slots of one tensor of a projection, split along dimension 0.

    prefix, name, parts: as in `LinearWeights.slots`; kind: last component of the names, such as "weight"; fields:
    additional fields of every slot.
    """
    slots, start = [], 0
    for part, length in (parts or {}).items():
        slots.append(WeightSlot(f"{prefix}{part}.{kind}", parameter, 0, start, length, **fields))
        start += length
    return [*slots, WeightSlot.whole(f"{prefix}{name}.{kind}", parameter, **fields)]
