"""Commands: the messages from a frontend to the engine core."""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from tandem.protocol.errors import FinishReason
from tandem.protocol.params import SamplingParams

MAX_PRIORITY = 100
MAX_NAME_BYTES = 256
"""Longest session name, cache salt or HTTP request id, in bytes of UTF-8."""
MAX_VERIFIED = 64
"""Maximum number of verified tokens of a sequence."""
MAX_ABORTS = 2**20
"""Maximum number of requests per `Abort`."""
RENEW_SECONDS = 1.0
"""Interval at which a frontend renews its lease, in seconds."""
LEASE_SECONDS = 5.0
"""Seconds of silence after which the engine takes a frontend for gone and ends its requests."""


class Command(Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of every message to the engine."""


class Hello(Command, frozen=True, array_like=True, tag=0):
    """First message of a connection.

    The engine ignores everything before a Hello that names its own epoch: otherwise a message queued for an engine that
    died would reach its successor.
    """

    protocol_version: int
    engine_epoch: int
    name: str
    lost_identity: bytes = b""
    """Identity of the sender's last connection, which it lost with its engine; answered by `Launched`."""


class KeyClaim(Struct, frozen=True, array_like=True):
    """API key that a sequence is computed for.

    The engine enforces its limits over all frontends.
    """

    name: str
    """Name of the key, which is the scope of its sessions, cache salts and limits."""
    max_concurrent: int = 0
    """Maximum open sequences of the key; 0 for no limit."""
    tokens_per_minute: int = 0
    """Maximum tokens per minute of the key, prompts and outputs together; 0 for no limit."""
    num_sequences: int = 1
    """Number of sequences of the group."""
    prompt_tokens: int = 0
    """Prompt tokens of the group; each prompt counts once, however many sequences it has."""
    shares_cache: bool = False
    """True to share cached prefixes with other keys where the sequence has no salt."""

    @property
    def has_limits(self) -> bool:
        """True if the engine has something to enforce."""
        return self.max_concurrent > 0 or self.tokens_per_minute > 0


class Submit(Command, frozen=True, array_like=True, tag=1):
    """Request to generate one sequence.

    The sender chooses `request_id` and never reuses it on its connection.
    """

    request_id: int
    prompt_ids: bytes
    """Token ids of the prompt, at least one, packed as little-endian int32."""
    sampling: SamplingParams
    constraint: str | None = None
    """Grammar of the output, as llguidance text (`LLMatcher.grammar_from_json_schema`); None for free text."""
    logprobs: int | None = None
    """Number of most probable tokens reported with the log-probability of each generated token; None: neither is
    reported."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens reported with the log-probability of each prompt token; None: neither is
    reported. The first token has no log-probability, as nothing precedes it."""
    priority: int = 0
    """Urgency, -MAX_PRIORITY to MAX_PRIORITY, higher first: the order of queue and steps under policy `priority`. Under
    every policy the lowest priority is preempted first."""
    session: str = ""
    """Session that keeps its KV between turns, open to every frontend; "" for none."""
    cache_salt: str = ""
    """Salt of the prefix cache: KV is shared only among requests with the same one."""
    http_request_id: str = ""
    """Id of the HTTP request, the same for all its sequences, for logs and inspections; "" for none."""
    group: int = 0
    """Request id of the first sequence of the same HTTP request; 0 for none. Once one of a group is refused for
    overload, those that follow are refused as well, and only the first refusal is counted."""
    lost_engines: int = 0
    """Number of engines that were lost with the same request."""
    is_traced: bool = False
    """True to have the engine report the times of the sequence, for a trace."""
    key: KeyClaim | None = None
    """API key of the request; None on a server without keys."""
    constraint_seconds: float = 0.0
    """CPU time that the frontend measured for `constraint`, in seconds; 0 if it measured none. Slow grammars get
    threads of their own."""
    speculation: bool = True
    """False to verify no drafts for the sequence."""
    prediction: bytes = b""
    """Token ids that the output probably has, packed like `prompt_ids`: drafts are taken from them. At most
    `Limits.max_prediction`, further ones are dropped; b"" for none."""
    adapter: str = ""
    """Name of the adapter; "" for the model without one."""
    num_verified: int = 0
    """Number of tokens at the end of the prompt that are verified, at most MAX_VERIFIED: `prompt_logprobs` applies to
    these only, and their KV is dropped once they are computed. 0: `prompt_logprobs` applies to the whole prompt."""
    logits: bool = False
    """True to report the logits of the verified tokens and of the token after them."""


class Abort(Command, frozen=True, array_like=True, tag=2):
    """End these requests. Idempotent; unknown ids are ignored.

    Each request that was still open ends as Finished with the reason given, which the frontend ignores: its own
    decision was the terminal event.
    """

    request_ids: Annotated[list[int], Meta(max_length=MAX_ABORTS)]
    reason: FinishReason = FinishReason.ABORT
    """Reason that the engine counts: STOP for the end by a stop string, which is complete."""


class Goodbye(Command, frozen=True, array_like=True, tag=3):
    """End of a connection: every request that is still open on it is aborted."""


class EndSession(Command, frozen=True, array_like=True, tag=4):
    """End a session, at once or after the turn in progress.

    The `Answer` is not ok if the session does not exist.
    """

    call: int
    """Number chosen by the sender, repeated in the answer."""
    session: str
    key: str = ""
    """Name of the API key that owns the session; "" for none."""


class SetPolicy(Command, frozen=True, array_like=True, tag=5):
    """Change the scheduling policy from the next step on. Answered by an `Answer`."""

    call: int
    policy: str


class Inspect(Command, frozen=True, array_like=True, tag=6):
    """Request an `Inspection`."""

    call: int


class Renew(Command, frozen=True, array_like=True, tag=7):
    """Renew the lease of this connection.

    A frontend sends it every RENEW_SECONDS from its event loop. The engine ends a connection from which it has received
    nothing at all for LEASE_SECONDS; it answers a Renew on a connection that it does not have with `Closed`. A further
    Renew follows each new list of adapters, whose `LoadAdapter` or `UnloadAdapter` is answered once all have it.
    """

    adapter_changes: int = -1
    """`AdapterList.changes` of the newest list that the frontend knows, in the Renew that follows it."""


PauseMode = Literal["abort", "wait", "keep"]
"""Effect of a pause on open requests: abort ends them; wait computes those that have begun to their end and keeps the
others waiting; keep freezes all where they are."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class Pause(Command, frozen=True, array_like=True, tag=8):
    """Request to pause until a `Resume`.

    No further steps are launched; in mode `wait` only no further requests are begun. The `Answer` comes once no step is
    in flight and, in mode `wait`, those that have begun have ended, with all sequences of their groups. It is not ok if
    a `Resume` came first.
    """

    call: int
    mode: PauseMode
    refuse_new: bool = False
    """True to refuse requests that arrive before the `Resume`; otherwise they wait for it."""
    clear_cache: bool = True
    """True if requests that it keeps are computed again after the weights were updated; False if they continue with
    their KV."""


class Resume(Command, frozen=True, array_like=True, tag=9):
    """End of a pause: everything continues where it stopped.

    Answered by an `Answer`, also without a pause.
    """

    call: int


class LoadAdapter(Command, frozen=True, array_like=True, tag=10):
    """Load an adapter.

    The `Answer` comes once requests may use it, or is not ok and has the reason.
    """

    call: int
    name: str
    path: str
    """Folder of its files, on the engine's machine."""
    load_inplace: bool = False
    """True to replace an adapter of the name: requests that use that one already keep it."""
    root: str = ""
    """Folder that its files have to be in, with all links followed; "": any."""


class UnloadAdapter(Command, frozen=True, array_like=True, tag=11):
    """Remove an adapter: requests that arrive later are refused.

    The `Answer` comes once no request uses it any more.
    """

    call: int
    name: str


class ResetPrefixCache(Command, frozen=True, array_like=True, tag=20):
    """Request to drop all KV that no request uses from the prefix cache. Answered by an `Answer`."""

    call: int


class InitWeightTransfer(Command, frozen=True, array_like=True, tag=21):
    """Join the process group of a trainer, which has rank 0 in it.

    The `Answer` comes once all ranks have joined.
    """

    call: int
    rank: int
    """Rank of the engine."""
    world_size: int
    address: str = ""
    """Host of the trainer's store; "" with a `unique_id`."""
    port: int = 0
    unique_id: bytes = b""
    """NCCL's id of the group; b"": it is in the store."""
    buffer_bytes: int = 0
    """Size above which a broadcast ends that packs several tensors; 0: each tensor has its own."""


class StartWeightUpdate(Command, frozen=True, array_like=True, tag=22):
    """Begin an update of the weights. Answered by an `Answer`."""

    call: int


class UpdateWeights(Command, frozen=True, array_like=True, tag=23):
    """Receive tensors that the trainer broadcasts in this order.

    The `Answer` comes once all have arrived, or is not ok. No step is launched meanwhile, nor until the update is
    finished.
    """

    call: int
    names: list[str]
    """Names that they have in a checkpoint; empty for those of the call before."""
    dtypes: list[str]
    shapes: list[list[int]]
    buffer_bytes: int | None = None
    """As in `InitWeightTransfer`, for this call; None: that of the group."""
    is_refused: bool = False
    """True for a call whose body was not valid. Its trainer may be sending nevertheless."""


class FinishWeightUpdate(Command, frozen=True, array_like=True, tag=24):
    """End an update: if all tensors have arrived, the engine computes with them from now on.

    Answered by an `Answer`, which is not ok if the weights are incomplete.
    """

    call: int
    version: str = ""
    """Name of the version; "": the engine counts."""


SwapMode = Literal["wait", "abort", "restart"]
"""Effect of a swap on requests that have begun, with all sequences of their groups: wait lets them end before, while
others queue; abort ends them in an error; restart computes their tokens again with the new weights, and continues their
text."""
SWAP_MODES: tuple[SwapMode, ...] = get_args(SwapMode)


class SwapWeights(Command, frozen=True, array_like=True, tag=12):
    """Replace the weights by those of another checkpoint of the same model.

    The checkpoint is checked and read in a process of its own first. The `Answer` comes once its weights serve, or are
    staged, or is not ok and has the reason.
    """

    call: int
    path: str
    """Folder of the checkpoint, on the engine's machine."""
    running: SwapMode = "wait"
    grace: float = 300.0
    """Seconds that running requests may take to end, with `wait`; then the swap is cancelled."""
    activate: bool = True
    """False to only stage the checkpoint; a later swap of the same path activates it."""
    version: str = ""
    """Version that outputs report; "": the highest number of a version so far plus 1."""
    root: str = ""
    """Folder below which its files must lie, with all links followed; "": any."""


class CancelSwap(Command, frozen=True, array_like=True, tag=13):
    """Cancel the swap that is in progress, or drop what is staged.

    The `Answer` is not ok if there is neither.
    """

    call: int


class InspectSwap(Command, frozen=True, array_like=True, tag=14):
    """Request the state of the swap, `Answer.swap`."""

    call: int


SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: frozenset[SleepTag] = frozenset(get_args(SleepTag))
"""Parts of the memory that an engine releases while it sleeps."""


class Sleep(Command, frozen=True, array_like=True, tag=15):
    """Release the memory of the weights and of the KV pool, until a `WakeUp`.

    The `Answer` comes once the engine sleeps, or is not ok and has the reason. Requests that arrive are refused from
    the command on.
    """

    call: int
    level: int = 1
    """1 to copy the weights to the host, 2 to drop them."""
    mode: PauseMode = "abort"
    """What happens to open requests: abort ends them in an error, wait lets all end before, keep has those that remain
    computed again after the wake."""


class WakeUp(Command, frozen=True, array_like=True, tag=16):
    """Restore released memory. The `Answer` is not ok if that fails; then what slept still sleeps."""

    call: int
    tags: list[str] = []
    """`SLEEP_TAGS` to restore; empty for all, which also loads weights that a sleep of level 2 has dropped."""


AnyCommand = (
    Hello
    | Submit
    | Abort
    | Goodbye
    | EndSession
    | SetPolicy
    | Inspect
    | Renew
    | Pause
    | Resume
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | InitWeightTransfer
    | StartWeightUpdate
    | UpdateWeights
    | FinishWeightUpdate
    | SwapWeights
    | CancelSwap
    | InspectSwap
    | Sleep
    | WakeUp
)
