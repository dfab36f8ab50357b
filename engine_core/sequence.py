"""One sequence being generated: the only mutable object of the scheduler."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

from tandem.engine_core.contracts import Constraint
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams


class CacheState:
    """What a sequence has of the prefix cache."""

    __slots__ = ("awaited_key", "matched", "matched_epoch", "namespace", "nodes", "num_cached_tokens", "pending_key")

    namespace: bytes
    """KV is shared only between sequences of the same namespace."""
    nodes: list[int]
    """Nodes of the tree that it reads and has locked: those of the first pages of its page table."""
    matched: list[int]
    """Nodes that hold its beginning, as found while it waited; it does not lock them."""
    matched_epoch: int
    """`RadixTree.epoch` when `matched` was found."""
    pending_key: bytes
    """Key of the page that it computes next and others wait for; empty: none."""
    awaited_key: bytes
    """Key of the page that it waited for in the queue; empty: none."""
    num_cached_tokens: int
    """Prompt tokens whose KV it did not have to compute."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.nodes, self.matched, self.matched_epoch = [], [], -1
        self.pending_key = self.awaited_key = b""
        self.num_cached_tokens = 0


class Sequence:
    """Arithmetic of one sequence.

    `tokens` are known on the host: the prompt and what has been committed. `num_scheduled_tokens` KV positions are
    enqueued on the device, `num_inflight_samples` samples are in flight. What remains to compute is the same for a
    prompt, a chunk of it and a decoded token: `pending = len(tokens) + num_inflight_samples - num_scheduled_tokens`.
    """

    __slots__ = (
        "arrival",
        "cache",
        "client",
        "compiling",
        "constraint",
        "end_ids",
        "id",
        "in_steady_decode",
        "inflight",
        "leases",
        "logprobs",
        "min_tokens",
        "next_page_boundary",
        "num_inflight_samples",
        "num_mapped_pages",
        "num_scheduled_tokens",
        "outcome",
        "pages",
        "params",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "queued_at",
        "reported_len",
        "request_id",
        "row",
        "session",
        "start_reported",
        "steps_skipped",
        "tokens",
        "total_len",
        "upload_end",
        "uploaded_len",
    )

    id: int
    """Ascending in the order of arrival."""
    total_len: int
    """Most positions it can ever take."""
    cache: CacheState
    upload_end: int
    """Positions below this one are uploaded by the rows that compute them; later ones are sampled on the device."""
    uploaded_len: int
    """Positions below this one have their token on the device; it matters until the prompt is computed."""
    pages: list[int]
    """Its page table: the pages of `cache.nodes`, then pages of its own."""
    num_mapped_pages: int
    """How many of `pages` the device's page table holds."""
    next_page_boundary: int
    """A settled row that starts below this position brings no pages and is not the last."""
    in_steady_decode: bool
    """Whether its rows are mere numbers and pages, one position each: no tokens to upload, no suppressed end."""
    compiling: bool
    """Whether it has to wait for its constraint before anything else."""
    logprobs: int | None
    """Alternatives wanted with the log-probability of each generated token; None: no log-probabilities."""
    prompt_logprobs: int | None
    """The same for each prompt token."""
    reported_len: int
    """Positions computed before a preemption: what follows them has been scored, and is not told twice."""
    start_reported: bool
    """Whether its frontend knows how much of its prompt was cached."""
    queued_at: float
    """When it came to the queue, for the first time or after a preemption."""
    steps_skipped: int
    """Steps since its last row that had none for it."""

    def __init__(
        self,
        seq_id: int,
        client: bytes,
        request_id: int,
        prompt: array[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        arrival: float = 0.0,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        compiling: bool = False,
        priority: int = 0,
        session: str = "",
        namespace: bytes = b"",
    ) -> None:
        self.id = seq_id
        self.client = client
        self.request_id = request_id
        self.tokens = prompt
        self.prompt_len = self.upload_end = len(prompt)
        self.params = params
        self.total_len = len(prompt) + params.max_tokens
        self.min_tokens = params.min_tokens
        self.end_ids = end_ids
        self.arrival = self.queued_at = arrival
        self.constraint = constraint
        self.compiling = compiling
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.priority = priority
        self.session = session
        self.cache = CacheState(namespace)
        self.in_steady_decode = self.start_reported = False
        self.num_scheduled_tokens = self.num_inflight_samples = self.inflight = 0
        self.row = -1
        self.pages = []
        self.num_mapped_pages = self.uploaded_len = self.next_page_boundary = self.reported_len = 0
        self.steps_skipped = self.preemptions = 0
        self.leases = ExitStack()
        self.outcome: Finished | Failure | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def kv_len(self) -> int:
        """Most positions whose KV is ever computed: the last token's is not."""
        return self.total_len - 1

    @property
    def scored(self) -> bool:
        """Whether every position of the prompt has to be computed for its log-probability, whatever a cache holds."""
        return self.prompt_logprobs is not None

    @property
    def pending(self) -> int:
        """Positions that could be computed now."""
        return len(self.tokens) + self.num_inflight_samples - self.num_scheduled_tokens

    @property
    def finishing(self) -> bool:
        """Whether everything that it may ever compute is on its way."""
        return len(self.tokens) + self.num_inflight_samples >= self.total_len

    def on_launch(self) -> None:
        """Called after a launch that counted, while the sequence is not settled yet: is it now?"""
        self.uploaded_len = self.num_scheduled_tokens
        self.in_steady_decode = (
            self.num_scheduled_tokens >= self.upload_end
            and self.num_scheduled_tokens + 1 - self.prompt_len >= self.min_tokens
        )

    def jumped(self) -> None:
        """Tokens were appended that the device does not have: the next row brings them."""
        if self.in_steady_decode:
            self.uploaded_len = self.num_scheduled_tokens
        self.upload_end, self.in_steady_decode = len(self.tokens), False

    def remap(self, index: int) -> None:
        """Have the next row bring the page at this index, which has changed, and those after it."""
        self.num_mapped_pages = min(self.num_mapped_pages, index)
        self.next_page_boundary = 0

    def restart(self) -> None:
        """Everything is to be computed again, what was generated with the prompt: it was preempted."""
        assert not self.inflight, f"restarted while in flight: {self}"
        self.preemptions += 1
        self.upload_end = len(self.tokens)
        self.steps_skipped = self.next_page_boundary = 0
        self.in_steady_decode = False
        self.reported_len = max(self.reported_len, self.num_scheduled_tokens)
        self.cache.awaited_key = b""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.prompt_len}+{self.generated} tokens of {self.total_len}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, num_inflight_samples={self.num_inflight_samples}, "
            f"inflight={self.inflight}, row={self.row}, "
            f"{len(self.pages)} pages, {len(self.cache.nodes)} shared, outcome={self.outcome})"
        )
