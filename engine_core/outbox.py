"""What the engine still has to tell one frontend."""

from tandem.protocol.codec import encode, step_output
from tandem.protocol.events import Failure, Finished, Started, TokenLogprobs


class Outbox:
    """Tokens and terminal events in columns, until they can be sent.

    A frontend that does not read gets its steps merged into one message later: a further token of a request is one
    more run in the columns, so what is kept is bounded by the lengths of the requests. Nothing is ever dropped. A
    message that could not go is kept encoded, and what comes after it waits: a try costs nothing but the try.
    """

    __slots__ = ("failures", "finished", "logprobs", "request_ids", "started", "stuck", "tokens")

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: list[Finished] = []
        self.failures: list[Failure] = []
        self.started: list[Started] = []
        self.stuck: bytes | None = None
        """The message that could not be sent, encoded."""

    @property
    def fresh(self) -> bool:
        """Whether there is something beside the stuck message."""
        return bool(self.request_ids or self.finished or self.failures or self.logprobs or self.started)

    def encode(self, step_id: int) -> bytes:
        """Everything that is not stuck as one message; empties the columns."""
        output = step_output(step_id, self.request_ids, self.tokens)
        output.finished.extend(self.finished)
        output.failures.extend(self.failures)
        output.logprobs.extend(self.logprobs)
        output.started.extend(self.started)
        columns = (self.request_ids, self.tokens, self.finished, self.failures, self.logprobs, self.started)
        for column in columns:
            column.clear()
        return encode(output)
