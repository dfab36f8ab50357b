"""What offline use returns and raises."""

from collections.abc import Sequence

from msgspec import Struct

from tandem.frontend.chat.message import ToolCall, join_deltas
from tandem.frontend.chat.message_parser import MessageParser, MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Usage


class Output(Struct, frozen=True):
    """One choice."""

    text: str
    """Of a chat, the content of the message."""
    token_ids: list[int]
    """As sampled, the id that ended the sequence among them."""
    finish_reason: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    """Calls of tools, of a chat."""


class Result(Struct, frozen=True):
    """What became of one prompt, or one conversation."""

    prompt_token_ids: list[int]
    outputs: list[Output]
    """As many as `n`."""
    usage: Usage

    @property
    def text(self) -> str:
        """That of the first choice."""
        return self.outputs[0].text


class RequestError(Exception):
    """A prompt or conversation that was refused, or failed; `index` is its place in the batch."""

    def __init__(self, index: int, error: ApiError) -> None:
        super().__init__(f"request {index}: {error.message}")
        self.index = index
        self.param = error.param
        self.code = error.code


def completed(admitted: Admitted, choices: Sequence[ChoiceDelta], usage: Usage) -> Result:
    """The result of the one prompt of a generation."""
    outputs = [Output(delta.text, list(delta.token_ids), delta.finish_reason or "") for delta in choices]
    return Result(admitted.prompts[0].ids, outputs, usage)


def answered(admitted: Admitted, shape: MessageShape, choices: Sequence[ChoiceDelta], usage: Usage) -> Result:
    """The result of a chat, each choice read as a message."""
    return Result(admitted.prompts[0].ids, [_output(delta, shape.new_parser()) for delta in choices], usage)


def _output(delta: ChoiceDelta, parser: MessageParser) -> Output:
    message = join_deltas(parser.push(delta))
    reason = parser.finish_reason(delta.finish_reason or "")
    return Output(message.content or "", list(delta.token_ids), reason, message.reasoning, message.calls)
