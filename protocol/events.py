"""Events: the messages from the engine core to its frontends.

They go to one frontend, except the heartbeat, which is published.
"""

from enum import StrEnum
from typing import Literal, get_args

from msgspec import Struct, field

from tandem.protocol.commands import PauseMode
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.stats import EngineStats

NO_LIMIT = 2**31 - 1
"""Value of a limit that never applies."""


class Event(Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of every message from the engine."""


class ModelFacts(Struct, frozen=True, array_like=True):
    """Facts about the served model that a frontend needs."""

    name: str
    vocab_size: int
    max_len: int
    """Context length: maximum number of positions of one sequence, prompt and output together."""
    end_ids: list[int]
    """End-of-sequence ids, which end a sequence unless the request ignores them."""
    tokenizer_fingerprint: str
    """SHA-256 of the engine's tokenizer.json in hex; "" if it has none."""
    device: str
    dtype: str
    created: int
    """Unix time of the engine's start, in seconds."""
    template_fingerprint: str = ""
    """SHA-256 of the checkpoint's own chat templates in hex; "" if it has none."""
    weight_format: str = ""
    """Format of the linear layers' weights, such as "bfloat16", "fp8" or "4 bits (gptq)"; "" if it is not known."""
    kv_dtype: str = ""
    """Data type of keys and values, such as "bfloat16" or "float8_e4m3fn"; "" if it is not known."""
    logprobs_mode: str = "raw_logprobs"
    """What log-probabilities of generated tokens are taken from: raw_logprobs or processed_logprobs."""
    max_loras: int = 0
    """Number of adapters that a step may mix; 0: the engine takes none."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    weight_transfer: str = ""
    """Backend by which a trainer may send weights, nccl or gloo; "": it may not."""
    draft_model: str = ""
    """Name of the draft model; "": there is none."""
    draft_weight_version: str = ""
    """Version of the weights when it was loaded, which later ones leave as it is; "" if they cannot change."""


class Limits(Struct, frozen=True, array_like=True):
    """Capacity of the engine."""

    max_rows: int
    kv_tokens: int
    page_size: int
    max_step_tokens: int
    max_waiting: int
    """Maximum number of requests that wait in the engine; further ones are refused as overloaded."""
    max_concurrent: int = NO_LIMIT
    """Maximum number of open sequences of all frontends; further ones are refused as overloaded."""
    max_queued_tokens: int = NO_LIMIT
    """Maximum number of prompt tokens of all frontends that wait for their first output; a prompt beyond it is refused
    as overloaded, unless no other waits."""
    max_prediction: int = 0
    """Number of token ids of a prediction that drafts are taken from; 0: the engine verifies no drafts."""


class AdapterFacts(Struct, frozen=True, array_like=True):
    """An adapter that requests may use."""

    name: str
    path: str
    """Folder of its files."""
    version: int
    """Number that no other adapter, and no earlier one of the name, has had."""
    root: str = ""
    """As in `LoadAdapter`."""
    weight_version: str = ""
    """Version of the base model's weights when it was loaded; "" on an engine whose weights cannot change."""


class AdapterList(Struct, frozen=True, array_like=True):
    """The adapters that requests may use."""

    changes: int
    """Number of changes since the engine's start: it orders heartbeats and answers, which come by two sockets."""
    adapters: list[AdapterFacts]


class Ready(Event, frozen=True, array_like=True, tag=0):
    """Answer to a `Hello`: the connection is open."""

    protocol_version: int
    engine_epoch: int
    model: ModelFacts
    limits: Limits
    adapters: AdapterList | None = None
    """The adapters that requests may use; None: the engine takes none."""


class Refused(Event, frozen=True, array_like=True, tag=1):
    """Answer to a `Hello` that cannot be served; the message names both versions."""

    message: str


class Finished(Struct, frozen=True, array_like=True):
    """Terminal event of a request that ended without an error.

    Its last tokens are in the same message's columns.
    """

    request_id: int
    reason: FinishReason
    stop_token_id: int | None = None
    """Id that ended the sequence, if one did: it counts as a token and is not part of the text."""


class Failure(Struct, frozen=True, array_like=True):
    """Terminal event of a request that failed."""

    request_id: int
    code: ErrorCode
    message: str
    retry_after: int = 0
    """Seconds after which the same request may succeed; 0 if they are unknown."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens of one sequence.

    They are the float32 log-softmax of the model's logits before bias, penalties, temperature, truncation and masks;
    under `--logprobs-mode processed_logprobs` those of generated tokens are taken after them. -inf and NaN may occur.
    """

    request_id: int
    start: int
    """Position of the first token in the sequence; positions below the prompt's length are prompt tokens."""
    top: int
    """Number of most probable tokens reported for each position."""
    lines: bytes
    """Packed little-endian records, one per token: its own float32 value, the `top` largest values in descending order,
    and their int32 ids. Of equal values the lowest id comes first."""
    ranks: bytes = b""
    """Packed little-endian int32 ranks of prompt tokens in the whole vocabulary, 1 for the most probable token; b"" for
    generated tokens."""


class TokenLogits(Struct, frozen=True, array_like=True):
    """Logits of consecutive tokens of one sequence, before bias, penalties, temperature, truncation and masks."""

    request_id: int
    start: int
    """Position of the first token in the sequence."""
    rows: bytes
    """Packed little-endian float32 [tokens, vocab_size]: each row is the distribution that its token is drawn from."""


class Started(Struct, frozen=True, array_like=True):
    """Announcement that a request begins to run with the next step.

    It is sent before the launch of that step, so a frontend that loses its engine knows which requests may be to blame
    (`Launched` makes up for one that did not leave the engine in time). A second one, before the first token, has the
    final number where more of the prompt was found in the cache meanwhile. A request that is preempted and admitted
    again is announced again only if the weights have changed since.
    """

    request_id: int
    cached_tokens: int
    """Prompt tokens with KV in the prefix cache."""
    weight_version: str = ""
    """Version of the weights that compute the request from now on; "" if they cannot change."""
    generated: int = 0
    """Number of output tokens before: those are of the versions announced before."""


class StepOutput(Event, frozen=True, array_like=True, tag=2):
    """Output of one step for one frontend, in columns.

    The i-th request has `counts[i]` tokens. Columns cost a tenth of a struct per row to encode and decode.
    """

    step_id: int
    request_ids: bytes
    """Request ids, packed as little-endian uint64."""
    counts: bytes
    """Number of tokens of each request, packed as little-endian uint16."""
    tokens: bytes
    """Tokens of all requests in order, `sum(counts)` of them, packed as little-endian int32."""
    finished: list[Finished] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of requests that want them, in the order of their positions within each request."""
    started: list[Started] = field(default_factory=list)


class SequenceTimes(Struct, frozen=True, array_like=True):
    """Times of one sequence, in seconds since the engine received it.

    They are independent of the host's clock, so that a frontend on another host can add them to the time at which it
    sent the request. Those that have not come yet are None. They are sent with the first token, and again with the end.
    """

    request_id: int
    admitted: float | None = None
    """Time at which it left the queue."""
    launched: float | None = None
    """Time at which its first step was launched."""
    first_token: float | None = None
    """Time at which its first token was committed."""
    ended: float | None = None
    num_steps: int = 0
    """Steps that computed a part of it."""
    preemptions: int = 0


class DetailedOutput(StepOutput, frozen=True, array_like=True, tag=7):
    """Output of a step with what most steps do not have."""

    times: list[SequenceTimes] = field(default_factory=list)
    """Times of sequences that are traced."""
    drafted: bytes = b""
    """Requests whose drafts were verified, once for each step, packed as little-endian uint64."""
    drafts: bytes = b""
    """Three bytes for each of them: the number of its drafts, that of the accepted ones, also behind a token that ended
    the sequence, and 1 if the drafts are from the prediction of the request, else 0."""
    logits: list[TokenLogits] = field(default_factory=list)
    """Logits of verified tokens."""


class Phase(StrEnum):
    """Phase of an engine's life."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


WeightState = Literal["ready", "changing", "incomplete", "sleeping"]
"""State of the weights: ready to compute with; changing, which counts as no stall; incomplete after a change that
failed half-way, or within an update in parts; sleeping while their memory or that of the KV pool is released."""


class WeightFacts(Struct, frozen=True, array_like=True):
    """Weights of an engine that can change them."""

    version: str
    """Version that outputs report."""
    state: WeightState
    problem: str = ""
    """Reason of a change that failed half-way."""
    asleep: list[str] = []
    """Tags whose memory is released, `commands.SLEEP_TAGS`."""
    is_sleep_due: bool = False
    """True if a sleep waits for the requests in progress; those that arrive are refused."""


SwapState = Literal["idle", "staging", "staged", "draining", "loading"]
"""State of a swap: idle without one; its checkpoint is being checked and read; it waits to be activated; it waits
for the steps in flight, and for running requests as its mode says; its weights are loaded, during which only heartbeats
report it."""
SWAP_STATES: tuple[SwapState, ...] = get_args(SwapState)


class SwapFacts(Struct, frozen=True, array_like=True):
    """The swap of weights as the engine sees it."""

    state: SwapState
    path: str
    """Folder of the checkpoint that is staged; "" if idle."""
    percent: int
    """Part of it that was read, or in state `loading` that was loaded."""
    active_path: str
    """Folder of the weights that serve."""
    version: str
    """Their version."""
    problem: str = ""
    """Reason why the last swap failed; "" if it has not."""


class Answer(Event, frozen=True, array_like=True, tag=4):
    """Answer to a command that has a `call` of this number."""

    call: int
    ok: bool
    message: str = ""
    """Reason if it is not ok."""
    pause_changes: int = 0
    """For a `Pause` or `Resume`, that number of the engine's stats once it was carried out."""
    adapters: AdapterList | None = None
    """For a `LoadAdapter` or `UnloadAdapter`, the adapters once it was carried out."""
    swap: SwapFacts | None = None
    """For a command of swaps, their state after it."""
    lacks_memory: bool = False
    """For a `Sleep` or `WakeUp` that is not ok, True if memory is missing: the same call may succeed later."""


SequenceState = Literal["waiting", "compiling", "following", "prefill", "decode", "leaving", "zombie"]
"""State of a request: waiting, also for its grammar (compiling) or for a page that another request computes
(following); running (prefill, decode); preempted (leaving) or ended (zombie) while a step in flight holds it."""
SEQUENCE_STATES: tuple[SequenceState, ...] = get_args(SequenceState)


class InspectedSequence(Struct, frozen=True, array_like=True):
    """One request as the scheduler sees it."""

    client: str
    request_id: int
    state: SequenceState
    row: int
    """Row that it holds; -1 for none."""
    prompt_len: int
    generated: int
    launched: int
    """Number of positions launched so far."""
    pages: int
    """Number of pages of the pool that it holds, over all groups of layers."""
    shared_pages: int
    """Number of its pages that are shared with the prefix cache."""
    cached_tokens: int
    priority: int
    preemptions: int
    age: float
    """Seconds since its arrival."""
    session: str = ""
    wait: float = 0.0
    """Seconds in the queue since its arrival or its last preemption; 0 unless it waits."""
    http_request_id: str = ""
    """Id of the HTTP request that it belongs to; "" for none."""
    key: str = ""
    """Name of its API key; "" for none."""
    drafted: int = 0
    """Number of drafts that were verified for it."""
    accepted: int = 0
    """Number of those that were accepted."""
    adapter: str = ""
    """Name of its adapter; "" for none."""


class InspectedSession(Struct, frozen=True, array_like=True):
    """One session as the scheduler sees it."""

    name: str
    busy: bool
    pages: int
    """Number of pages of the pool that it keeps, over all groups of layers."""
    idle: float
    """Seconds since its last turn ended; 0 while one is in progress."""
    key: str = ""
    """Name of the API key that owns the session; "" for none."""


class Speculation(Struct, frozen=True, array_like=True):
    """How an engine drafts tokens; the numbers of its drafts are among its stats."""

    method: str
    max_drafts: int
    """Maximum number of drafts that a step verifies for each sequence."""
    is_adaptive: bool
    """True if steps verify fewer when few are accepted."""


class Inspection(Event, frozen=True, array_like=True, tag=5):
    """Answer to an `Inspect`: a snapshot of the scheduler."""

    call: int
    policy: str
    stats: EngineStats
    pages_free: int
    pages_settling: int
    """Pages that are needed only by a step in flight."""
    sequences: list[InspectedSequence]
    """Running sequences in the order of admission, preempted ones and zombies, then waiting ones in the order of the
    queue, then compiling ones."""
    sessions: list[InspectedSession]
    omitted: int = 0
    """Number of waiting requests that are not listed."""
    pause_mode: PauseMode | None = None
    """Mode of the pause in force, also while it still drains; None without one."""
    refuses_new: bool = False
    """True if requests that arrive are refused because of the pause."""
    speculation: Speculation | None = None
    """None if no step verifies drafts."""


class PauseFacts(Struct, frozen=True, array_like=True):
    """Pause of an engine by its operators."""

    mode: PauseMode | None
    """Mode of the pause in force, also while it still drains; None without one."""
    refuses_new: bool
    """True if requests that arrive are refused because of the pause."""
    is_complete: bool
    """True once no step is in flight."""


class Heartbeat(Event, frozen=True, array_like=True, tag=3):
    """Heartbeat of an engine, published at a fixed interval to all listeners."""

    engine_epoch: int
    phase: Phase
    percent: int
    detail: str
    pending: int
    """Requests without a terminal event yet."""
    stats: EngineStats
    adapters: AdapterList | None = None
    """The adapters that requests may use; None: the engine takes none."""
    weights: WeightFacts | None = None
    """The weights; None: they cannot change."""
    swap: SwapFacts | None = None
    """The swap of weights; None: there cannot be one."""
    pause: PauseFacts | None = None
    """The pause; None before the engine is built."""


class Closed(Event, frozen=True, array_like=True, tag=6):
    """End of a connection by the engine, which has aborted its requests.

    The frontend was silent for longer than its lease, did not read, or its key was removed. A new connection begins
    with a Hello under another identity.
    """

    message: str
    """Reason, for the frontend's log."""


class Launched(Event, frozen=True, array_like=True, tag=9):
    """Requests that an engine that is gone had begun to compute.

    Sent by the next engine, before `Ready`. They belong to the connection that `Hello.lost_identity` names, and may
    have ended before. Their announcements may have been lost with the engine.
    """

    request_ids: list[int]


class KeyUsage(Event, frozen=True, array_like=True, tag=8):
    """Usage of an API key with limits.

    It is sent ahead of the first output or the refusal of each request of the key.
    """

    name: str
    limit_requests: int
    """Most open sequences; 0 for no limit."""
    remaining_requests: int
    limit_tokens: int
    """Most tokens a minute; 0 for no limit."""
    remaining_tokens: int
    reset_tokens: float
    """Seconds until all tokens of a minute are there again."""
    reset_requests: float | None = None
    """Estimated seconds until no sequence is open, counted from now; None if none has ended in the last minute."""


AnyEvent = (
    Ready | Refused | StepOutput | Heartbeat | Answer | Inspection | Closed | DetailedOutput | KeyUsage | Launched
)
