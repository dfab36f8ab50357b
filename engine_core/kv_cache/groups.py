"""Groups of layers that share a page table."""

from msgspec import Struct


class KVGroup(Struct, frozen=True):
    """Layers whose keys and values lie in the same pages, because they attend to the same positions."""

    layers: tuple[int, ...]
    """Indexes of the layers, ascending."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all before it."""
