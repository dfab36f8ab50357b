"""One sequence being generated: the only mutable object of the scheduler."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

from tandem.engine_core.contracts import Constraint
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams


class Sequence:
    """Arithmetic of one sequence.

    `tokens` are known on the host: the prompt and what has been committed. `launched` KV positions are enqueued on
    the device, `unseen` samples are in flight. What remains to compute is the same for a prompt, a chunk of it and a
    decoded token: `pending = len(tokens) + unseen - launched`.
    """

    __slots__ = (
        "announced",
        "arrival",
        "awaited",
        "cached",
        "claim",
        "client",
        "compiling",
        "constraint",
        "end_ids",
        "found",
        "found_at",
        "id",
        "inflight",
        "launched",
        "leases",
        "logprobs",
        "mapped",
        "min_tokens",
        "namespace",
        "outcome",
        "pages",
        "params",
        "passed",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "queued_at",
        "request_id",
        "root",
        "row",
        "session",
        "settled",
        "shared",
        "steady_until",
        "tokens",
        "told",
        "total_len",
        "unseen",
        "uploaded",
        "uploads",
    )

    id: int
    """Ascending in the order of arrival."""
    total_len: int
    """Most positions it can ever take."""
    namespace: bytes
    """Its KV is shared only with sequences of the same one."""
    uploads: int
    """Positions below this one are uploaded by the rows that compute them; later ones are sampled on the device."""
    uploaded: int
    """Positions below this one have their token on the device; it matters until the prompt is computed."""
    pages: list[int]
    shared: int
    """How many of `pages` lie in the prefix cache; the others are its own."""
    mapped: int
    """How many of `pages` the device's page table holds."""
    steady_until: int
    """A settled row that starts below this position brings no pages and is not the last."""
    settled: bool
    """Whether its rows are mere numbers and pages, one position each: no tokens to upload, no suppressed end."""
    compiling: bool
    """Whether it has to wait for its constraint before anything else."""
    logprobs: int | None
    """Alternatives wanted with the log-probability of each generated token; None: no log-probabilities."""
    prompt_logprobs: int | None
    """The same for each prompt token."""
    told: int
    """Positions computed before a preemption: what follows them has been scored, and is not told twice."""
    announced: bool
    """Whether its frontend knows how much of its prompt was cached."""
    root: bytes
    """Namespace under which its pages lie in the prefix cache."""
    claim: bytes
    """Key of the page that others wait for, for this sequence computes it next."""
    awaited: bytes
    """Key of the page that it waited for in the queue."""
    found: list[int]
    """Pages of the prefix cache that hold its beginning, as far as was known in the queue..."""
    found_at: int
    """...when `RadixTree.lost` was this."""
    cached: int
    """Prompt tokens whose KV it did not have to compute."""
    queued_at: float
    """When it came to the queue, for the first time or after a preemption."""
    passed: int
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
        self.prompt_len = self.uploads = len(prompt)
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
        self.settled = self.announced = False
        self.launched = self.unseen = self.inflight = 0
        self.row = -1
        self.pages = []
        self.shared = self.mapped = self.uploaded = self.cached = self.steady_until = self.told = 0
        self.root = self.claim = self.awaited = b""
        self.found, self.found_at = [], -1
        self.passed = self.preemptions = 0
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
        return len(self.tokens) + self.unseen - self.launched

    @property
    def finishing(self) -> bool:
        """Whether everything that it may ever compute is on its way."""
        return len(self.tokens) + self.unseen >= self.total_len

    def on_launch(self) -> None:
        """Called after a launch that counted, while the sequence is not settled yet: is it now?"""
        self.uploaded = self.launched
        self.settled = self.launched >= self.uploads and self.launched + 1 - self.prompt_len >= self.min_tokens

    def jumped(self) -> None:
        """Tokens were appended that the device does not have: the next row brings them."""
        if self.settled:
            self.uploaded = self.launched
        self.uploads, self.settled = len(self.tokens), False

    def map(self, pages: int, page_size: int) -> None:
        """The device knows the first `pages` of its pages now."""
        self.mapped = pages
        self.steady_until = min(pages * page_size, self.total_len - 1)

    def remap(self, index: int) -> None:
        """The page at this index has become another: the next row has to bring it."""
        self.mapped = min(self.mapped, index)
        self.steady_until = 0

    def restart(self) -> None:
        """Everything is to be computed again, what was generated with the prompt: it was preempted."""
        assert not self.inflight, f"restarted while in flight: {self}"
        self.preemptions += 1
        self.uploads = len(self.tokens)
        self.passed = self.steady_until = 0
        self.settled = False
        self.told = max(self.told, self.launched)
        self.awaited = b""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.prompt_len}+{self.generated} tokens of {self.total_len}, "
            f"launched={self.launched}, unseen={self.unseen}, inflight={self.inflight}, row={self.row}, "
            f"{len(self.pages)} pages, {self.shared} shared, outcome={self.outcome})"
        )
