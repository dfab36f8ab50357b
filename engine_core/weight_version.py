"""Version of a model's weights, as the scheduler and its sequences see it."""

from msgspec import Struct


class WeightVersion(Struct, frozen=True):
    """Weights that an engine computes with until they change."""

    number: int
    """Number of changes since the engine's start: part of the namespace of the prefix cache."""
    name: str
    """Version that outputs report; "" on an engine whose weights cannot change."""


MAX_DIGITS = 1000
"""Largest number of digits of a version that counts as a number. Clients send at most 256; `int` takes 4300."""


def number_of(name: str) -> int:
    """Return the number that a version is, 0 for other names."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) <= MAX_DIGITS else 0


INITIAL = WeightVersion(0, "")
