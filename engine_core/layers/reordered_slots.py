"""Slots of a fused projection whose outputs a checkpoint has in another order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot
from tandem.engine_core.quantization.fields import unsupported


class Piece(NamedTuple):
    """Consecutive outputs of a part of a projection, in the checkpoint's order."""

    part: str
    start: int
    length: int

    @property
    def name(self) -> str:
        """Name of the piece as a part of its own."""
        return f"{self.part}[{self.start}:{self.start + self.length}]"


def reordered_slots(
    linear: LinearWeights, prefix: str, name: str, parts: Mapping[str, int], pieces: Sequence[Piece]
) -> list[WeightSlot]:
    """List the slots of a fused projection whose parts fill it piece by piece.

    The storage format lists the slots of the pieces as if each were a part. These then read slices of the tensors of
    their part, along the dimension in which the two differ, or all of a tensor that does not depend on the number of
    outputs.

    prefix, name, parts: as in `LinearWeights.slots`; pieces: of all parts, in the order of the projection's outputs.
    Raises ConfigError for tensors that cannot be cut at the pieces, such as those with packed outputs.
    """
    whole = {slot.name: slot for slot in linear.slots(prefix, name, parts)}
    own = {f"{prefix}{piece.name}": piece for piece in pieces}
    slots = []
    for slot in linear.slots(prefix, name, {piece.name: piece.length for piece in pieces}):
        module, _, kind = slot.name.rpartition(".")
        piece = own.get(module)
        if piece is None:
            slots.append(slot)
            continue
        stored = whole[f"{prefix}{piece.part}.{kind}"]
        slots.append(_sliced(slot, stored, piece, parts[piece.part]))
    return slots


def _sliced(slot: WeightSlot, whole: WeightSlot, piece: Piece, outputs: int) -> WeightSlot:
    """Return the slot of a piece that reads its slice of the tensor of its part. outputs: of the part."""
    shapes, found = whole.accepted_shapes, slot.accepted_shapes[0]
    dims = [dim for dim, (size, part) in enumerate(zip(shapes[0], found, strict=True)) if size != part]
    if not dims:
        return replace(slot, name=whole.name)
    (dim,) = dims
    size = shapes[0][dim]
    start, rest = divmod(piece.start * size, outputs)
    if rest or found[dim] * outputs != piece.length * size:
        raise unsupported(
            f"{whole.name} has {size} rows or columns for {outputs} outputs, which cannot be cut into the outputs of "
            f"one head, {piece.length}"
        )
    source = SourceSlice(shapes[0], dim, start, found[dim])
    return replace(slot, name=whole.name, source=source, shapes=shapes if len(shapes) > 1 else ())
