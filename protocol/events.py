"""What the engine core tells a frontend, and what its heartbeat tells everybody."""

from enum import StrEnum
from typing import Literal, get_args

from msgspec import Struct, field

from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.stats import EngineStats


class Event(Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of every message on the way from the engine."""


class ModelFacts(Struct, frozen=True, array_like=True):
    """What a frontend needs to know of the served model."""

    name: str
    vocab_size: int
    max_len: int
    """Most positions one sequence may hold, prompt and output together."""
    end_ids: list[int]
    """Ids that end a sequence unless the request ignores them."""
    tokenizer_fingerprint: str
    """sha256 of the engine's tokenizer.json, or "" when it has none."""
    device: str
    dtype: str
    created: int
    """Unix seconds at which the engine came up."""


class Limits(Struct, frozen=True, array_like=True):
    """What the engine can hold at once."""

    max_rows: int
    kv_tokens: int
    page_size: int
    max_step_tokens: int
    max_waiting: int
    """Requests that may wait in the engine; one more is refused as overloaded."""


class Ready(Event, frozen=True, array_like=True, tag=0):
    """Answer to a `Hello`: the connection is open."""

    protocol_version: int
    engine_epoch: int
    model: ModelFacts
    limits: Limits


class Refused(Event, frozen=True, array_like=True, tag=1):
    """Answer to a `Hello` that cannot be served; the text names both versions."""

    message: str


class Finished(Struct, frozen=True, array_like=True):
    """Terminal: the request ended as asked. Its last tokens are in the same message's columns."""

    request_id: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The id that ended it, when one did: counted among the tokens, not to be rendered as text."""


class Failure(Struct, frozen=True, array_like=True):
    """Terminal: the request ended in an error."""

    request_id: int
    code: ErrorCode
    message: str


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens of one sequence: the float32 log-softmax of the model's logits as they
    are, before bias, penalties, temperature, truncation and masks. -inf and NaN may occur."""

    request_id: int
    start: int
    """Position of the first token in the sequence; those below the prompt's length are prompt tokens."""
    top: int
    """How many of the most probable tokens of each position come along."""
    lines: bytes
    """Packed little-endian, one line a token: its own float32 value, the `top` largest values in descending order, and
    their int32 ids. Of equal ones the lowest id comes first."""


class Started(Struct, frozen=True, array_like=True):
    """A request is about to yield its first token. Sent for those of which part of the prompt was cached."""

    request_id: int
    cached_tokens: int
    """Prompt tokens whose KV was there already."""


class StepOutput(Event, frozen=True, array_like=True, tag=2):
    """All that one step yielded for one frontend, in columns: the i-th request has `counts[i]` tokens.

    Columns cost a tenth of one struct a row to encode and decode.
    """

    step_id: int
    request_ids: bytes
    """Packed little-endian uint64."""
    counts: bytes
    """Packed little-endian uint16."""
    tokens: bytes
    """Packed little-endian int32, `sum(counts)` of them."""
    finished: list[Finished] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that asked for them, in the order of their positions within each request."""
    started: list[Started] = field(default_factory=list)


class Phase(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Answer(Event, frozen=True, array_like=True, tag=4):
    """Answer to a command that has a `call` of this number."""

    call: int
    ok: bool
    message: str = ""
    """What is wrong, if it is not ok."""


SequenceState = Literal["waiting", "compiling", "following", "prefill", "decode", "leaving", "zombie"]
"""Waits, or for its grammar (compiling), or for a page that another computes (following); runs (prefill, decode); was
preempted (leaving) or has ended (zombie) while a step in flight holds it."""
SEQUENCE_STATES: tuple[SequenceState, ...] = get_args(SequenceState)


class InspectedSequence(Struct, frozen=True, array_like=True):
    """One request as the scheduler sees it."""

    client: str
    request_id: int
    state: SequenceState
    row: int
    """-1: none."""
    prompt_len: int
    generated: int
    launched: int
    """Positions computed or on their way."""
    pages: int
    shared_pages: int
    """Those of its pages that lie in the prefix cache."""
    cached_tokens: int
    priority: int
    preemptions: int
    age: float
    """Seconds since its arrival."""
    session: str = ""
    wait: float = 0.0
    """Seconds since it came to the queue, for the first time or after a preemption; 0 for one that does not wait."""


class InspectedSession(Struct, frozen=True, array_like=True):
    """One session."""

    name: str
    busy: bool
    pages: int
    idle: float
    """Seconds since its last turn ended; 0 while one is in progress."""


class Inspection(Event, frozen=True, array_like=True, tag=5):
    """Answer to an `Inspect`: what the scheduler holds at this moment."""

    call: int
    policy: str
    stats: EngineStats
    pages_free: int
    pages_settling: int
    """Pages that nobody needs but a step in flight."""
    sequences: list[InspectedSequence]
    """Running ones in the order of admission, leaving ones and zombies, then waiting ones in the order of the queue,
    then compiling ones."""
    sessions: list[InspectedSession]
    omitted: int = 0
    """Waiting requests beyond those listed."""


class Heartbeat(Event, frozen=True, array_like=True, tag=3):
    """One heartbeat, published to whoever listens."""

    engine_epoch: int
    phase: Phase
    percent: int
    detail: str
    pending: int
    """Requests the engine still owes a terminal event."""
    stats: EngineStats


AnyEvent = Ready | Refused | StepOutput | Heartbeat | Answer | Inspection
