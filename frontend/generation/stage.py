"""Stages of a request's work, for its trace."""

from msgspec import Struct

from tandem.protocol.events import SequenceTimes


class Stage(Struct, frozen=True):
    """One stage of a request's work in the frontend.

    Times are those of the monotonic clock, in seconds.
    """

    name: str
    """parse, render, tokenize or grammar."""
    start: float
    end: float


class TracedSequence(Struct, frozen=True):
    """One sequence of an attempt."""

    choice: int
    times: SequenceTimes | None
    """Times in the engine; None if that was lost, or has told none."""
    cached_tokens: int


class Attempt(Struct):
    """One time that a request was sent to an engine.

    Times are those of the monotonic clock, in seconds.
    """

    submitted: float
    engine_epoch: int
    ended: float | None = None
    sequences: list[TracedSequence] = []
