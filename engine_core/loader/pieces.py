"""The cutting of tensors into pieces that are read one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from tandem.engine_core.loader.slots import SourceSlice

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a tensor in a file.

    They have an index in the part that a slot reads.
    """

    start: int
    """Offset of the first element in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the elements; it has as many dimensions as the tensor."""
    window: Index
    """The elements that belong to the part, as an index of the piece."""
    index: Index
    """Index of the piece in the part."""


def cut(shape: tuple[int, ...], source: SourceSlice | None, most: int) -> Iterator[Piece]:
    """Yield the pieces of a part of a tensor, in the order of the file.

    most: maximum number of elements of a piece, positive. If the part is cut along an inner dimension, neighbouring
    elements are read too.

    shape: of the whole tensor; source: the part, None for all.
    """
    if not shape or (source is None and 0 < prod(shape) <= most):
        whole = (slice(None),) * len(shape)
        yield Piece(0, shape, whole, whole)
        return
    bounds = [(0, length) for length in shape]
    if source is not None:
        bounds[source.dim] = (source.start, source.stop)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    along = next(dim for dim, stride in enumerate(strides) if stride <= most)
    inner = strides[along]
    if not inner:
        return
    first, end = bounds[along]
    rest = [slice(*bound) for bound in bounds[along + 1 :]]
    step = most // inner
    for outer in product(*(range(*bound) for bound in bounds[:along])):
        base = sum(place * stride for place, stride in zip(outer, strides, strict=False))
        places = [slice(place - bound[0], place - bound[0] + 1) for place, bound in zip(outer, bounds, strict=False)]
        for start in range(first, end, step):
            stop = min(start + step, end)
            yield Piece(
                base + start * inner,
                (*(1 for _ in outer), stop - start, *shape[along + 1 :]),
                (*(slice(None) for _ in outer), slice(None), *rest),
                (*places, slice(start - first, stop - first), *(slice(None) for _ in rest)),
            )
