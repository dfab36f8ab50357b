"""Stages and attempts of a request, for its trace."""

from msgspec import Struct

from tandem.protocol.events import SequenceTimes


class Stage(Struct, frozen=True):
    """Stage of a request in the frontend.

    Times are those of the monotonic clock, in seconds.

    """

    name: str
    """parse, render, tokenize or grammar."""
    start: float
    end: float


class TracedSequence(Struct, frozen=True):
    """Sequence of an attempt."""

    choice: int
    times: SequenceTimes | None
    """Times in the engine; None if it was lost or has not reported them."""
    cached_tokens: int


class Attempt(Struct):
    """Attempt to run a request on an engine.

    Times are those of the monotonic clock, in seconds.

    """

    submitted: float
    engine_epoch: int
    ended: float | None = None
    sequences: list[TracedSequence] = []
