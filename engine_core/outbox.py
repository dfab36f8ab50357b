"""What the engine still has to tell one frontend."""

from protocol.codec import step_output
from protocol.events import Failure, Finished, StepOutput


class Outbox:
    """Tokens and terminal events in columns, until they can be sent.

    A frontend that does not read gets its steps merged into one message later: a further token of a request is one
    more run in the columns, so what is kept is bounded by the lengths of the requests. Nothing is ever dropped.
    """

    __slots__ = ("failures", "finished", "request_ids", "tokens")

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.tokens: list[int] = []
        self.finished: list[Finished] = []
        self.failures: list[Failure] = []

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.finished or self.failures)

    def message(self, step_id: int) -> StepOutput:
        output = step_output(step_id, self.request_ids, [1] * len(self.request_ids), self.tokens)
        output.finished.extend(self.finished)
        output.failures.extend(self.failures)
        return output

    def clear(self) -> None:
        self.request_ids.clear()
        self.tokens.clear()
        self.finished.clear()
        self.failures.clear()
