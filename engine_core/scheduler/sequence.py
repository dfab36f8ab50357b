"""One sequence being generated: the only mutable object of the scheduler."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

from engine_core.contracts import Constraint
from protocol.events import Failure, Finished
from protocol.params import SamplingParams


class Sequence:
    """Arithmetic of one sequence.

    `tokens` are known on the host: the prompt and what has been committed. `launched` KV positions are enqueued on
    the device, `unseen` samples are in flight. What remains to compute is the same for a prompt, a chunk of it and a
    decoded token: `pending = len(tokens) + unseen - launched`.
    """

    __slots__ = (
        "arrival",
        "client",
        "compiling",
        "constraint",
        "end_ids",
        "id",
        "inflight",
        "launched",
        "leases",
        "logprobs",
        "mapped",
        "min_tokens",
        "outcome",
        "pages",
        "params",
        "prompt_len",
        "prompt_logprobs",
        "request_id",
        "row",
        "settled",
        "tokens",
        "total_len",
        "unseen",
        "uploads",
    )

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
    ) -> None:
        self.id = seq_id
        self.client = client
        self.request_id = request_id
        self.tokens = prompt
        self.prompt_len = len(prompt)
        self.params = params
        self.total_len = len(prompt) + params.max_tokens
        """Most positions it can ever take."""
        self.min_tokens = params.min_tokens
        self.end_ids = end_ids
        self.arrival = arrival
        self.constraint = constraint
        self.compiling = compiling
        """Whether it has to wait for its constraint before anything else."""
        self.logprobs = logprobs
        """Alternatives wanted with the log-probability of each generated token; None: no log-probabilities."""
        self.prompt_logprobs = prompt_logprobs
        self.launched = 0
        self.unseen = 0
        self.inflight = 0
        self.row = -1
        self.uploads = self.prompt_len
        """Positions below this one are uploaded by the rows that compute them; later ones are sampled on the device."""
        self.pages: list[int] = []
        self.mapped = 0
        """How many of `pages` the device's page table holds."""
        self.settled = False
        """Whether its rows are mere numbers now, one position each: no news for the device, no suppressed end."""
        self.leases = ExitStack()
        self.outcome: Finished | Failure | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scored(self) -> bool:
        """Whether every position of the prompt has to be computed for its log-probability, whatever a cache holds."""
        return self.prompt_logprobs is not None

    @property
    def pending(self) -> int:
        """Positions that could be computed now."""
        return len(self.tokens) + self.unseen - self.launched

    def on_launch(self, new_pages: int) -> None:
        """Called after a launch that counted, while the sequence is not settled yet: is it now?"""
        self.mapped += new_pages
        self.settled = (
            self.launched >= self.uploads
            and self.mapped == len(self.pages)
            and self.launched + 1 - self.prompt_len >= self.min_tokens
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.prompt_len}+{self.generated} tokens of {self.total_len}, "
            f"launched={self.launched}, unseen={self.unseen}, inflight={self.inflight}, row={self.row}, "
            f"{len(self.pages)} pages, outcome={self.outcome})"
        )
