"""What a frontend tells the engine core."""

from msgspec import Struct

from protocol.params import SamplingParams


class Command(Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of every message on the way to the engine."""


class Hello(Command, frozen=True, array_like=True, tag=0):
    """First message of a connection. The engine ignores whatever arrives before one that names its own epoch:
    a message queued for an engine that died would otherwise reach its successor."""

    protocol_version: int
    engine_epoch: int
    name: str


class Submit(Command, frozen=True, array_like=True, tag=1):
    """One sequence to generate. `request_id` is the sender's own, never reused on its connection."""

    request_id: int
    prompt_ids: bytes
    """Packed little-endian int32 token ids, at least one."""
    sampling: SamplingParams
    constraint: str | None = None
    """Text of an llguidance grammar that the output has to follow, as `LLMatcher.grammar_from_json_schema` makes it."""
    logprobs: int | None = None
    """How many of the most probable tokens come with the log-probability of each generated token; None: none of it."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, which nothing precedes."""


class Abort(Command, frozen=True, array_like=True, tag=2):
    """The frontend wants nothing more of these requests. Idempotent; unknown ids are ignored. Each one that was still
    open ends as Finished(ABORT), which the frontend has no use for: its own decision was the terminal event."""

    request_ids: list[int]


class Goodbye(Command, frozen=True, array_like=True, tag=3):
    """The frontend leaves: everything it still has open is aborted."""


AnyCommand = Hello | Submit | Abort | Goodbye
