"""One sequence being generated: the only mutable object of the scheduler."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

from tandem.engine_core.adapter import Adapter, cache_namespace
from tandem.engine_core.contracts import Constraint
from tandem.engine_core.plan import PADDING_PAGE
from tandem.engine_core.weight_version import INITIAL, WeightVersion
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Finished


class CacheState:
    """State of a sequence in the prefix cache."""

    __slots__ = (
        "awaited_key",
        "awaited_state",
        "cuts",
        "depth",
        "is_stale",
        "is_truncated",
        "matched",
        "matched_epoch",
        "namespace",
        "nodes",
        "num_cached_tokens",
        "pending_key",
        "restart",
        "start",
        "states_epoch",
    )

    namespace: bytes
    """Namespace of the prefix cache: KV is shared only between sequences of the same one."""
    nodes: list[int]
    """Nodes of the tree that the sequence reads and has locked: they hold the first pages of its page tables."""
    start: int
    """Node at which the match ended when the sequence was admitted; 0: nothing was cached."""
    matched: list[int]
    """Nodes that hold the sequence's first tokens, as found last; it does not lock them."""
    depth: int
    """Number of nodes of `matched` in the longest match, as found last; 0: it was not looked for."""
    matched_epoch: int
    """`RadixTree.epoch` when `matched` was found."""
    pending_key: bytes
    """Key of the page that the sequence computes next and others may wait for; empty: none."""
    awaited_key: bytes
    """Key of the page that the sequence waited for in the queue; empty: none."""
    num_cached_tokens: int
    """Number of prompt tokens that were not computed, because their KV was cached."""
    cuts: list[int]
    """Ends of chunks at which a checkpoint of the recurrent state is to be saved, ascending; not the prompt's end."""
    is_stale: bool
    """True if the weights have changed since the sequence began to compute its KV: it is not shared from then on."""
    is_truncated: bool
    """True if KV was dropped by `KVManager.truncate`: the row's recurrent state covers more tokens than the KV."""
    restart: int
    """Position at which a preempted sequence can continue from its own checkpoint; 0: at none."""
    awaited_state: tuple[int, int]
    """Id of a running sequence, and position of its checkpoint, that the sequence waits for in the queue."""
    states_epoch: int
    """`StateCache.epoch` when the sequence looked for a checkpoint last."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.nodes, self.matched, self.matched_epoch = [], [], -1
        self.start = self.depth = 0
        self.pending_key = self.awaited_key = b""
        self.num_cached_tokens = 0
        self.is_stale = self.is_truncated = False
        self.cuts, self.restart, self.awaited_state, self.states_epoch = [], 0, (-1, 0), -1


class DeviceState:
    """Contents of the device's tables for a sequence."""

    __slots__ = ("num_mapped_pages", "upload_end", "uploaded_len")

    upload_end: int
    """Position below which tokens are uploaded by the rows that compute them; later ones are sampled on the device."""
    uploaded_len: int
    """Position below which the device has the tokens; kept until the prompt is computed."""
    num_mapped_pages: int
    """Number of pages of the sequence, from its first on, that the device's page table holds."""

    def __init__(self, upload_end: int) -> None:
        self.upload_end = upload_end
        self.uploaded_len = self.num_mapped_pages = 0


class WireState:
    """Reports that the frontend has received, in addition to the tokens."""

    __slots__ = ("reported_cached", "reported_len", "reported_version")

    reported_cached: int
    """Number of cached prompt tokens that was reported to the frontend when the sequence started; -1 before."""

    reported_len: int
    """Number of positions computed before a preemption: their log-probabilities have been sent and are not sent again.
    """

    reported_version: str
    """Name of the version of the weights that was reported to the frontend last."""

    def __init__(self) -> None:
        self.reported_cached, self.reported_len, self.reported_version = -1, 0, ""


class SequenceTimes:
    """Times of a sequence's life on the engine's clock, in seconds."""

    __slots__ = ("admitted", "first_token")

    admitted: float | None
    """Time at which the sequence got its first row; None before."""
    first_token: float | None
    """Time at which the step of its first token was committed; None before."""

    def __init__(self) -> None:
        self.admitted = self.first_token = None


class DraftStats:
    """Drafts of a sequence that were verified."""

    __slots__ = ("accepted", "drafted", "max_drafts", "model_lag", "model_len")

    max_drafts: int
    """Maximum number of drafts that a step verifies for the sequence; 0: it gets one token a step."""
    drafted: int
    """Number of drafts that were verified."""
    accepted: int
    """Number of them that were accepted."""
    model_len: int
    """Lower bound of the positions, from the first on, whose keys and values the draft model has computed."""
    model_lag: int
    """Number of launched positions that the draft model lacks, besides the last one or two of its last step."""

    def __init__(self) -> None:
        self.model_len = self.model_lag = 0
        self.max_drafts = self.drafted = self.accepted = 0


class RequestGroup:
    """The sequences of one HTTP request, which change weights together."""

    __slots__ = ("has_begun", "id")

    id: int
    """Request id of the first of them (`Submit.group`), or of the only one."""
    has_begun: bool
    """True once one of them has been admitted."""

    def __init__(self, group_id: int) -> None:
        self.id, self.has_begun = group_id, False


class Sequence:
    """One sequence and the arithmetic of its positions.

    `tokens` are known on the host: the prompt and what has been committed. `num_scheduled_tokens` KV positions are
    enqueued on the device, `num_inflight_samples` samples are in flight. The number of positions that remain to compute
    follows from one formula for a prompt, a chunk of it and a decoded token:
    `pending = len(tokens) + num_inflight_samples - num_scheduled_tokens`.

    A step with drafts is counted as one sample and one position per row. Further accepted tokens are added at commit;
    until then these counts are lower bounds of the device's (I9).
    """

    __slots__ = (
        "adapter",
        "arrival",
        "cache",
        "cacheable_len",
        "client",
        "compiling",
        "constraint",
        "device",
        "drafts",
        "end_ids",
        "first_pages",
        "group",
        "id",
        "in_steady_decode",
        "inflight",
        "leases",
        "min_tokens",
        "next_page_boundary",
        "num_inflight_drafts",
        "num_inflight_samples",
        "num_scheduled_tokens",
        "outcome",
        "pages",
        "preemptions",
        "priority",
        "prompt_len",
        "queued_at",
        "request_id",
        "row",
        "steps_skipped",
        "submit",
        "times",
        "tokens",
        "total_len",
        "weights",
        "wire",
    )

    id: int
    """Number of the sequence, ascending in the order of arrival."""
    submit: Submit
    """Request of the sequence, without the ids of its prompt: `tokens` begins with them. Fields that steady decode
    reads are copied into attributes of the sequence."""
    total_len: int
    """Largest number of tokens that the sequence can ever have."""
    cacheable_len: int
    """Number of tokens whose KV the prefix cache may hold: those before verified ones, or all."""
    cache: CacheState
    """State of the sequence in the prefix cache."""
    device: DeviceState
    """Contents of the device's tables for the sequence."""
    wire: WireState
    """Reports that the frontend has received."""
    times: SequenceTimes
    """Times of the sequence's life, for the metrics."""
    drafts: DraftStats
    """Drafts of the sequence that were verified."""
    num_inflight_drafts: int
    """Number of drafts in the steps in flight. The device may have up to this many more tokens than the host counts."""
    pages: tuple[list[int], ...]
    """Page table of the sequence for each KV group, by page index; no tables while the sequence holds no pages. The
    pages of `cache.nodes` come first, then own pages."""
    first_pages: list[int]
    """Index of the first page that the sequence still holds, for each class of groups (`kv_cache/page_classes.py`); the
    tables have `PADDING_PAGE` before it."""
    next_page_boundary: int
    """Below this position a decode row needs no new page and is not the last row."""
    in_steady_decode: bool
    """True if each row of the sequence is one position, with no tokens to upload."""
    group: RequestGroup
    """Group of the sequence; `Scheduler.add` joins those of one HTTP request."""
    adapter: Adapter | None
    """Adapter of the sequence; None: it has none."""
    weights: WeightVersion
    """Weights that compute the sequence; while it has no pages, those that will."""
    compiling: bool
    """True while the sequence's grammar is being compiled."""
    queued_at: float
    """Time, in seconds, when the sequence was queued, at its arrival or after its last preemption."""
    steps_skipped: int
    """Number of steps without a row of the sequence since the last one with it."""

    def __init__(
        self,
        seq_id: int,
        client: bytes,
        submit: Submit,
        prompt: array[int],
        end_ids: frozenset[int],
        arrival: float = 0.0,
        adapter: Adapter | None = None,
    ) -> None:
        self.id = seq_id
        self.client = client
        self.submit = submit
        self.request_id = submit.request_id
        self.priority = submit.priority
        self.min_tokens = submit.sampling.min_tokens
        self.tokens = prompt
        self.prompt_len = len(prompt)
        self.total_len = len(prompt) + submit.sampling.max_tokens
        self.cacheable_len = self.total_len if not submit.num_verified else self.prompt_len - submit.num_verified
        self.end_ids = end_ids
        self.arrival = self.queued_at = arrival
        self.constraint: Constraint | None = None
        self.compiling = submit.constraint is not None
        self.adapter = adapter
        self.group = RequestGroup(submit.group or submit.request_id)
        self.weights = INITIAL
        self.cache, self.device = CacheState(self._namespace()), DeviceState(len(prompt))
        self.wire, self.times, self.drafts = WireState(), SequenceTimes(), DraftStats()
        self.in_steady_decode = False
        self.num_scheduled_tokens = self.num_inflight_samples = self.num_inflight_drafts = self.inflight = 0
        self.row = -1
        self.pages, self.first_pages = (), []
        self.next_page_boundary = self.steps_skipped = self.preemptions = 0
        self.leases = ExitStack()
        self.outcome: Finished | Failure | None = None

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt that are known on the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def kv_len(self) -> int:
        """Largest number of positions with KV: the last token's KV is never computed."""
        return self.total_len - 1

    @property
    def num_pages(self) -> int:
        """Number of pages that the sequence holds, over all groups."""
        return sum([len(table) - table.count(PADDING_PAGE) for table in self.pages])

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are wanted, or of its verified tokens."""
        return self.submit.prompt_logprobs is not None

    @property
    def is_unshared(self) -> bool:
        """True if no other sequence may use the KV that the sequence computed.

        It is of several weights, or may hold NaN, because the model failed.
        """
        failed = isinstance(self.outcome, Failure) and self.outcome.code is ErrorCode.MODEL_FAILED
        return failed or self.cache.is_stale

    @property
    def ignores_cache(self) -> bool:
        """True if all positions of the prompt are computed: the prefix cache has no log-probabilities of its tokens."""
        return self.submit.prompt_logprobs is not None and not self.submit.num_verified

    @property
    def first_scored(self) -> int:
        """Position of the first prompt token whose log-probability is wanted, if any is."""
        return self.cacheable_len if self.submit.num_verified else 1

    @property
    def pending(self) -> int:
        """Number of positions that could be computed now."""
        return len(self.tokens) + self.num_inflight_samples - self.num_scheduled_tokens

    @property
    def min_device_len(self) -> int:
        """Lower bound of the device's length after the launched steps (I9)."""
        return min(len(self.tokens) + self.num_inflight_samples, self.total_len)

    @property
    def max_device_len(self) -> int:
        """Upper bound of the device's length after the launched steps (I9), if all drafts in flight are accepted."""
        return min(len(self.tokens) + self.num_inflight_samples + self.num_inflight_drafts, self.total_len)

    @property
    def finishing(self) -> bool:
        """True if every token that the sequence may have is known or in flight."""
        return self.min_device_len >= self.total_len

    def use_weights(self, weights: WeightVersion) -> None:
        """Have the sequence, which holds no pages, look for KV of these weights only."""
        assert not self.pages, f"new weights for a sequence with KV: {self}"
        if weights is not self.weights or self.cache.is_stale:
            self.weights = weights
            found, self.cache = self.cache.num_cached_tokens, CacheState(self._namespace())
            self.cache.num_cached_tokens = found

    def _namespace(self) -> bytes:
        adapter = 0 if self.adapter is None else self.adapter.version
        return cache_namespace(self.weights.number, adapter, self.submit.cache_salt)

    def on_launch(self) -> None:
        """Update `in_steady_decode` after a launch.

        Called until the sequence is in steady decode.
        """
        self.device.uploaded_len = self.num_scheduled_tokens
        self.in_steady_decode = self.num_scheduled_tokens >= self.device.upload_end

    def jumped(self) -> None:
        """Note that tokens forced by a grammar were appended. The next row uploads them.

        The sample in flight, if any, is dropped: its token would be the first of them.
        """
        if self.in_steady_decode:
            self.device.uploaded_len = self.num_scheduled_tokens
        self.device.upload_end, self.in_steady_decode = len(self.tokens), False
        self.num_inflight_samples = 0

    def remap(self, index: int) -> None:
        """Have the next row upload the page table from this index on, because the page there has changed."""
        self.device.num_mapped_pages = min(self.device.num_mapped_pages, index)
        self.next_page_boundary = 0

    def restart(self) -> None:
        """Have all tokens computed again after a preemption, generated ones included."""
        assert not self.inflight, f"restarted while in flight: {self}"
        self.preemptions += 1
        self.device.upload_end = len(self.tokens)
        self.steps_skipped = self.next_page_boundary = 0
        self.in_steady_decode = False
        self.wire.reported_len = max(self.wire.reported_len, self.num_scheduled_tokens)
        self.cache.awaited_key = b""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, request {self.submit.http_request_id!r}, "
            f"{self.prompt_len}+{self.generated} tokens of {self.total_len}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, num_inflight_samples={self.num_inflight_samples}, "
            f"inflight={self.inflight}, row={self.row}, "
            f"{self.num_pages} pages, {len(self.cache.nodes)} shared, outcome={self.outcome})"
        )
