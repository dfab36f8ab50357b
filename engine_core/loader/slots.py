"""Slots: the regions of a model that checkpoint tensors fill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine_core.errors import ConfigError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes, in the words of safetensors, that any floating-point parameter can be filled from by a cast."""


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """The part of a checkpoint tensor that one slot reads."""

    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    dim: int = 0
    """Dimension along which the part is cut."""
    start: int = 0
    """First index of the part."""
    length: int | None = None
    """Number of indices of the part; None: up to the end."""

    @property
    def stop(self) -> int:
        """End of the part, exclusive."""
        return self.shape[self.dim] if self.length is None else self.start + self.length


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The region of a parameter that one checkpoint tensor, or a part of it, fills.

    The region is `start` to `start + length - 1` along `dim`. Slots of one parameter have one `dim`.
    """

    name: str
    """Name of the checkpoint tensor. A tensor may have several slots, if it fills several parameters."""
    parameter: Tensor
    dim: int
    start: int
    length: int
    source: SourceSlice | None = None
    """Part of the checkpoint tensor that is read; None: a tensor of the region's shape, whole."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Function from the tensor read to one of the region's shape, such as a transposition or an unpacking.

    It is called on the parameter's device, by any thread.
    """
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """Dtypes of the checkpoint tensor that can be read, in the words of safetensors."""
    tied_to: str | None = None
    """Name of another slot of the same region: a checkpoint may hold both tensors if they are equal."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that the whole checkpoint tensor may have, all accepted by the transform; empty: the shape of the
    region, or of `source`."""
    is_optional: bool = False
    """True if the region already holds the default for checkpoints that lack the tensor."""
    on_filled: Callable[[], None] | None = None
    """Callback that runs once when all slots of the model are filled, even if several slots have it."""
    view: tuple[int, ...] | None = None
    """Shape in which the region is filled, if it is not the parameter's: one expert's of all experts, for example."""

    @classmethod
    def whole(
        cls,
        name: str,
        parameter: Tensor,
        source: SourceSlice | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        dtypes: tuple[str, ...] = FLOAT_DTYPES,
    ) -> "WeightSlot":
        """Return the slot of a whole parameter."""
        return cls(name, parameter, 0, 0, parameter.shape[0], source, transform, dtypes)

    @property
    def accepted_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that the checkpoint tensor may have, the usual one first."""
        return self.shapes or (self.region_shape if self.source is None else self.source.shape,)

    @property
    def region_shape(self) -> tuple[int, ...]:
        """Shape of the region."""
        if self.view is not None:
            return self.view
        shape = self.parameter.shape
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @property
    def target(self) -> Tensor:
        """The region itself, to be written."""
        region = self.parameter.narrow(self.dim, self.start, self.length)
        return region if self.view is None else region.view(self.view)

    def check(self, shape: Sequence[int]) -> None:
        """Raise ConfigError unless a shape equals the region's.

        shape: of the data that was read, or of the transform's result.
        """
        if tuple(shape) != self.region_shape:
            raise ConfigError(
                f"{self.name}: read {list(shape)} for a region of shape {list(self.region_shape)}; "
                "the slice or the transform of its slot does not fit the checkpoint"
            )

    def fill(self, tensor: Tensor) -> None:
        """Write a tensor read from the checkpoint, cast to the parameter's dtype.

        Raises ConfigError if the transform's result does not have the region's shape.
        """
        value = tensor if self.transform is None else self.transform(tensor)
        self.check(value.shape)
        self.target.copy_(value)


class Loadable(Protocol):
    """A model as the loader sees it."""

    def weight_slots(self) -> list[WeightSlot]:
        """List a slot for each name that a checkpoint may use.

        Several names may cover the same region (a fused projection and its parts): a checkpoint has to cover all of
        each parameter once. The preferred names come first: those are named when a region is not covered.
        """
