"""What a frontend tells the engine core."""

from msgspec import Struct

from tandem.protocol.params import SamplingParams

MAX_PRIORITY = 100
MAX_NAME_BYTES = 256
"""Of a session's name or a cache salt, in UTF-8."""


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
    priority: int = 0
    """Higher is more urgent, -MAX_PRIORITY to MAX_PRIORITY: it orders queue and steps under the policy `priority`, and
    under any the lowest is preempted first."""
    session: str = ""
    """Conversation whose KV stays between turns; "": none. Any frontend may go on with it."""
    cache_salt: str = ""
    """Cached KV is shared only among requests of the same salt."""


class Abort(Command, frozen=True, array_like=True, tag=2):
    """The frontend wants nothing more of these requests. Idempotent; unknown ids are ignored. Each one that was still
    open ends as Finished(ABORT), which the frontend has no use for: its own decision was the terminal event."""

    request_ids: list[int]


class Goodbye(Command, frozen=True, array_like=True, tag=3):
    """The frontend leaves: everything it still has open is aborted."""


class EndSession(Command, frozen=True, array_like=True, tag=4):
    """Forgets a session, at once or with its turn in progress. Answered by an `Answer`, not ok if there is none."""

    call: int
    """Number of the sender's own, which the answer repeats."""
    session: str


class SetPolicy(Command, frozen=True, array_like=True, tag=5):
    """Changes the scheduling policy from the next step on. Answered by an `Answer`."""

    call: int
    policy: str


class Inspect(Command, frozen=True, array_like=True, tag=6):
    """Asks for an `Inspection`."""

    call: int


AnyCommand = Hello | Submit | Abort | Goodbye | EndSession | SetPolicy | Inspect
