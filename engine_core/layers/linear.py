"""Linear maps as layers see them.

Their weights own the storage, the checkpoint slots and the product.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.loader.slots import WeightSlot


class Norm(Protocol):
    """A root mean square norm over the residual stream.

    A linear map may fuse it with its product.
    """

    weight: Tensor
    """Factors of the normalised elements, [hidden]."""
    update_weight: Tensor | None
    """Factors of the norm of an update before it is added, [hidden]; None: it is added as it is."""
    eps: float

    def __call__(self, update: Tensor, residual: Tensor | None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add the update to the residual stream (None: start it).

        Return the normalised stream and the stream, both [T, hidden]. order: the columns of the first are returned in
        it, [hidden] int32.
        """

    def quantized(
        self, update: Tensor, residual: Tensor | None, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Do the same with the normalised stream rounded to one byte."""


class LinearWeights(Protocol):
    """The weights of y = x W^T + b in one storage format.

    A projection is asked for together with the norm before it and the gated activation behind it, because some devices
    do them in one launch.
    """

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product, [T, outputs].

        x: [T, inputs]; out: memory for the result, contiguous.
        """

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, normalise it and multiply.

        Return the product and the stream. x, residual: [T, inputs]; residual None: x starts the stream. activation: the
        product's first half is a gate, and activation(gate) * rest, [T, outputs / 2], is returned in its place.
        """

    def apply_normed_quantized(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Do what `apply_normed` does with an activation, and round the result.

        to: the format that the product behind the gate takes.
        """

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Return the format of the inputs of a product of a number of rows.

        None stands for the model's dtype. What computes the inputs may write them in it, for `apply_quantized`; `apply`
        rounds them itself.
        """

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Return the product of inputs in `input_format`, [T, outputs]."""

    def reorder_producer(self, source: "LinearWeights") -> None:
        """Note that the inputs are activation(gate) * up of the product of another map.

        Nothing else reads that product, so weights that want their inputs in another order may sort the other map's
        outputs once both are loaded.
        """

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        """List the slots of the checkpoint's tensors.

        They are `prefix + part` for each part (name and number of outputs, in order) of a fused projection, and
        `prefix + name` for the whole.
        """

    def embedding_table(self) -> Tensor:
        """Return the weights as one row for each output, [outputs, inputs].

        The rows are in the model's dtype and share the weights' storage, for an embedding tied to an output head.
        Raises ConfigError if the format has no such rows.
        """


def projection_slots(
    parameter: Tensor, prefix: str, name: str, parts: Mapping[str, int] | None, kind: str, **fields: Any
) -> list[WeightSlot]:
    """List the slots of one tensor of a projection, split along dimension 0.

    prefix, name, parts: as in `LinearWeights.slots`; kind: last part of the names, such as "weight"; fields: further
    fields of every slot.
    """
    slots, start = [], 0
    for part, length in (parts or {}).items():
        slots.append(WeightSlot(f"{prefix}{part}.{kind}", parameter, 0, start, length, **fields))
        start += length
    return [*slots, WeightSlot.whole(f"{prefix}{name}.{kind}", parameter, **fields)]
