"""Output of one frontend until it can be sent."""

from tandem.protocol.codec import encode, step_output, with_details
from tandem.protocol.events import (
    Failure,
    Finished,
    SequenceTimes,
    Started,
    TokenLogits,
    TokenLogprobs,
)

MAX_UNSENT_BYTES = 64 * 2**20
"""Maximum output, in bytes, that is kept for a frontend that does not read."""
MAX_UNSENT_SECONDS = 30.0
"""Longest time for which output is kept while a frontend takes no message at all. One that reads slowly takes them in
batches: libzmq makes room when half of a queue has been read."""

_TOKEN_BYTES, _EVENT_BYTES = 12, 64
"""Sizes of one token with its request id, and of another event, at most. Both as they are on the wire."""


class Outbox:
    """Output for one frontend, in columns, until it can be sent.

    The steps of a frontend that does not read are merged into one later message: each further token of a request is one
    more entry in the columns. A message that could not be sent is kept encoded, and later ones wait behind it, so that
    a retry costs only the send. Nothing is dropped but all of it together, with a frontend that `overrun` calls gone.
    """

    __slots__ = (
        *(
            "drafted",
            "drafts",
            "failures",
            "finished",
            "logits",
            "logprobs",
            "request_ids",
            "started",
            "times",
            "tokens",
        ),
        *("_logprob_bytes", "_refused_at", "unsent"),
    )

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.logits: list[TokenLogits] = []
        self.finished: list[Finished] = []
        self.failures: list[Failure] = []
        self.started: list[Started] = []
        self.times: list[SequenceTimes] = []
        self.drafted: list[int] = []
        self.drafts: list[int] = []
        self.unsent: bytes | None = None
        """Encoded message that could not be sent."""
        self._logprob_bytes = 0
        self._refused_at: float | None = None
        """Time of the first of the sends that failed since one succeeded."""

    @property
    def has_new(self) -> bool:
        """True if there is output besides the unsent message."""
        columns = (self.request_ids, self.finished, self.failures, self.logprobs, self.logits, self.started, self.times)
        return any(columns)

    @property
    def num_bytes(self) -> int:
        """Size of all that is kept, in bytes, within a few per cent."""
        unsent = len(self.unsent) if self.unsent is not None else 0
        events = len(self.finished) + len(self.failures) + len(self.started) + len(self.times)
        columns = _TOKEN_BYTES * (len(self.tokens) + len(self.drafted))
        return unsent + columns + _EVENT_BYTES * events + self._logprob_bytes

    def add_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Append log-probabilities."""
        self.logprobs += logprobs
        self._logprob_bytes += sum([len(part.lines) + len(part.ranks) + _EVENT_BYTES for part in logprobs])

    def add_logits(self, logits: list[TokenLogits]) -> None:
        """Append logits."""
        self.logits += logits
        self._logprob_bytes += sum([len(part.rows) + _EVENT_BYTES for part in logits])

    def record_send(self, sent: bool, now: float) -> None:
        """Record whether a message was taken, at a time in seconds."""
        if sent:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now

    def overrun(self, now: float) -> str:
        """Return the reason to count the frontend as gone; "" for none."""
        if self.num_bytes > MAX_UNSENT_BYTES:
            return f"it has not read {self.num_bytes / 2**20:.0f} MiB of output, at most {MAX_UNSENT_BYTES >> 20}"
        if self._refused_at is not None and now - self._refused_at > MAX_UNSENT_SECONDS:
            return f"it has read nothing for {now - self._refused_at:.0f} s, at most {MAX_UNSENT_SECONDS:.0f}"
        return ""

    def encode(self, step_id: int) -> bytes:
        """Encode the columns as one message and empty them."""
        output = step_output(step_id, self.request_ids, self.tokens)
        if self.times or self.drafted or self.logits:  # a message of another kind, so that others do not grow
            output = with_details(output, [*self.times], self.drafted, self.drafts, self.logits)
        output.finished.extend(self.finished)
        output.failures.extend(self.failures)
        output.logprobs.extend(self.logprobs)
        output.started.extend(self.started)
        events = (self.finished, self.failures, self.logprobs, self.logits, self.started, self.times)
        for column in (self.request_ids, self.tokens, self.drafted, self.drafts, *events):
            column.clear()
        self._logprob_bytes = 0
        return encode(output)
