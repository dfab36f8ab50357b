"""One sequence being generated: the only mutable object of the scheduler."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

from tandem.engine_core.contracts import Constraint
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams


class Sequence:
    """Arithmetic of one sequence.

    `tokens` are known on the host: the prompt and what has been committed. `num_scheduled_tokens` KV positions are
    enqueued on the device, `num_inflight_samples` samples are in flight. What remains to compute is the same for a
    prompt, a chunk of it and a decoded token: `pending = len(tokens) + num_inflight_samples - num_scheduled_tokens`.
    """

    __slots__ = (
        "arrival",
        "awaited_key",
        "cache_namespace",
        "cached_path",
        "cached_path_epoch",
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
        "namespace",
        "next_page_boundary",
        "num_cached_tokens",
        "num_inflight_samples",
        "num_mapped_pages",
        "num_scheduled_tokens",
        "num_shared_pages",
        "outcome",
        "pages",
        "params",
        "pending_key",
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
    namespace: bytes
    """Its KV is shared only with sequences of the same one."""
    upload_end: int
    """Positions below this one are uploaded by the rows that compute them; later ones are sampled on the device."""
    uploaded_len: int
    """Positions below this one have their token on the device; it matters until the prompt is computed."""
    pages: list[int]
    num_shared_pages: int
    """How many of `pages` lie in the prefix cache; the others are its own."""
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
    cache_namespace: bytes
    """Namespace under which its pages lie in the prefix cache."""
    pending_key: bytes
    """Key of the page that others wait for, for this sequence computes it next."""
    awaited_key: bytes
    """Key of the page that it waited for in the queue."""
    cached_path: list[int]
    """Pages of the prefix cache that hold its beginning, as far as was known in the queue..."""
    cached_path_epoch: int
    """...when `RadixTree.lost` was this."""
    num_cached_tokens: int
    """Prompt tokens whose KV it did not have to compute."""
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
        self.namespace = namespace
        self.in_steady_decode = self.start_reported = False
        self.num_scheduled_tokens = self.num_inflight_samples = self.inflight = 0
        self.row = -1
        self.pages = []
        self.num_shared_pages = self.num_mapped_pages = self.uploaded_len = self.num_cached_tokens = (
            self.next_page_boundary
        ) = self.reported_len = 0
        self.cache_namespace = self.pending_key = self.awaited_key = b""
        self.cached_path, self.cached_path_epoch = [], -1
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

    def map(self, pages: int, page_size: int) -> None:
        """The device knows the first `pages` of its pages now."""
        self.num_mapped_pages = pages
        self.next_page_boundary = min(pages * page_size, self.total_len - 1)

    def remap(self, index: int) -> None:
        """The page at this index has become another: the next row has to bring it."""
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
        self.awaited_key = b""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.prompt_len}+{self.generated} tokens of {self.total_len}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, num_inflight_samples={self.num_inflight_samples}, "
            f"inflight={self.inflight}, row={self.row}, "
            f"{len(self.pages)} pages, {self.num_shared_pages} shared, outcome={self.outcome})"
        )
