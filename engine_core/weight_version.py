"""Version of a model's weights, as the scheduler and its sequences see it."""

from msgspec import Struct


class WeightVersion(Struct, frozen=True):
    """Weights that an engine computes with until they change."""

    number: int
    """Number of changes since the engine's start: part of the namespace of the prefix cache."""
    name: str
    """Version that outputs report; "" on an engine whose weights cannot change."""


INITIAL = WeightVersion(0, "")
