"""Groups of layers that share a page table."""

from msgspec import Struct


class KVGroup(Struct, frozen=True):
    """Layers that keep their keys and values in the same pages.

    They can share pages because they attend to the same positions.
    """

    layers: tuple[int, ...]
    """Indexes of the layers, ascending."""
    window: int | None = None
    """Number of positions that a query sees, its own included; None: its own and all before it."""
