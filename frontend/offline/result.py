"""Results and errors of offline inference."""

from collections.abc import Sequence

from msgspec import Struct

from tandem.frontend.chat.message import ToolCall, join_deltas
from tandem.frontend.chat.message_parser import MessageParser, MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Usage


class Output(Struct, frozen=True):
    """One choice of a result."""

    text: str
    """Text of the choice; for a chat, the content of the message."""
    token_ids: list[int]
    """Sampled ids, including the one that ended the sequence."""
    finish_reason: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    """Tool calls of a chat."""


class Result(Struct, frozen=True):
    """Result of one prompt or one conversation."""

    prompt_token_ids: list[int]
    outputs: list[Output]
    """Choices, `n` of them."""
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text


class EngineError(Exception):
    """The engine process could not be started, is not ready in time, or has ended."""


class RequestError(Exception):
    """A prompt or conversation was refused or failed.

    `index` is its position in the batch.
    """

    def __init__(self, index: int, error: ApiError) -> None:
        super().__init__(f"request {index}: {error.message}")
        self.index = index
        self.param = error.param
        self.code = error.code


def completion_result(admitted: Admitted, choices: Sequence[ChoiceDelta], usage: Usage) -> Result:
    """Build the result of a completion from the choices of its one prompt."""
    outputs = [Output(delta.text, list(delta.token_ids), delta.finish_reason or "") for delta in choices]
    return Result(admitted.prompts[0].ids, outputs, usage)


def chat_result(admitted: Admitted, shape: MessageShape, choices: Sequence[ChoiceDelta], usage: Usage) -> Result:
    """Build the result of a chat; each choice is parsed as a message."""
    return Result(admitted.prompts[0].ids, [_output(delta, shape.new_parser()) for delta in choices], usage)


def _output(delta: ChoiceDelta, parser: MessageParser) -> Output:
    message = join_deltas(parser.push(delta))
    reason = parser.finish_reason(delta.finish_reason or "")
    return Output(message.content or "", list(delta.token_ids), reason, message.reasoning, message.calls)
