"""Groups of layers that share a page table.

All pages of a pool have the same size, and any free page serves any group: no memory is set aside for a kind of layer.
So layers with a window, which need few pages, and layers that see all positions are split into groups of at most the
number of layers that a page has room for.
"""

from collections.abc import Sequence

from msgspec import Struct

from tandem.engine_core.integers import ceil_div

MAX_GROUPS = 16
"""Maximum number of groups. Each adds a page table, and a page to allocate every `page_size` positions of a row."""
MAX_UNUSED = 0.05
"""Share of a page that may be left without a layer, to have fewer groups."""


class KVGroup(Struct, frozen=True):
    """Layers that keep their keys and values in the same pages.

    They can share pages because they attend to the same positions.
    """

    layers: tuple[int, ...]
    """Indexes of the layers, ascending."""
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of positions that a query sees, its own included; None: its own and all before it."""


def partition(windows: Sequence[int | None], kv_heads: int, head_dim: int) -> tuple[KVGroup, ...]:
    """Split the layers of a model into groups of layers with equal windows.

    All groups are of one size, but the last one of a window may be smaller. Layers of one window form one group. The
    groups that see all positions come first, then those of larger windows.

    windows: of each layer.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    size = _group_size({window: len(layers) for window, layers in layers_of.items()})
    return tuple(
        KVGroup(tuple(layers_of[window][first : first + size]), kv_heads, head_dim, window)
        for window in sorted(layers_of, key=lambda window: (window is not None, -(window or 0)))
        for first in range(0, len(layers_of[window]), size)
    )


def _group_size(counts: dict[int | None, int]) -> int:
    """Return the number of layers in a page.

    It is the largest that leaves at most MAX_UNUSED of the memory of short and of long sequences unused; if none does,
    the one that leaves the least. counts: number of layers by window.
    """
    sizes = [size for size in range(max(counts.values()), 0, -1) if _num_groups(counts, size) <= MAX_GROUPS]
    sizes = sizes or [max(counts.values())]
    fitting = [size for size in sizes if _unused(counts, size) <= MAX_UNUSED]
    return fitting[0] if fitting else min(sizes, key=lambda size: _unused(counts, size))


def _num_groups(counts: dict[int | None, int], size: int) -> int:
    return sum(ceil_div(count, size) for count in counts.values())


def _unused(counts: dict[int | None, int], size: int) -> float:
    """Return the share of layers without use in the pages of short or of long sequences, whichever is more.

    A short sequence, within all windows, has pages of all groups for all positions. A long one has few pages of groups
    with a window.
    """
    kinds = [counts]
    if None in counts:
        kinds.append({None: counts[None]})
    totals = [(size * _num_groups(kind, size), sum(kind.values())) for kind in kinds]
    return max((room - used) / used for room, used in totals)
