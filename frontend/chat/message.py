"""The output of one choice as an assistant's message: thoughts, then content and calls of tools."""

from msgspec import Struct

from tandem.frontend.chat.deltas import CallArguments, CallStart, Content, MessageDelta, Reasoning
from tandem.frontend.chat.reasoning import ReasoningParser
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.request.tools import ToolUse


class MessageShape(Struct, frozen=True):
    """What the outputs of a request may hold beside content."""

    tool_use: ToolUse = ToolUse()
    tool_format: ToolFormat | None = None
    """How calls are written; None where there are none to be read."""
    reasoning: bool = False
    thoughts_open: bool = False
    """Whether the prompt has begun the thoughts already."""
    close_id: int | None = None
    """The token that closes thoughts, where it is one."""

    @property
    def plain(self) -> bool:
        """Whether all output is content."""
        return self.tool_format is None and not self.reasoning

    def parser(self) -> "MessageParser":
        """A fresh parser for one choice."""
        reasoning = ReasoningParser(self.thoughts_open) if self.reasoning else None
        tools: ToolParser | None = None
        if self.tool_format is not None:
            names = frozenset(tool.name for tool in self.tool_use.tools)
            required = self.tool_use.choice.mode == "required"
            tools = ToolParser(self.tool_format, names, self.tool_use.parallel, required)
        return MessageParser(reasoning, tools, self.close_id)


class MessageParser:
    """Turns the pieces of one choice into deltas of a message."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, close_id: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._close_id = close_id
        self._until_close = 0
        self._closed = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens up to the one that closed the thoughts; None where thoughts are closed by no token of their own."""
        if self._reasoning is None or not self._reasoning.thought:
            return 0
        return None if self._close_id is None else self._until_close

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, piece: ChoiceDelta) -> list[MessageDelta]:
        """What a piece adds; with its finish reason also what was held back."""
        if self._reasoning is None:
            deltas: list[MessageDelta] = [Content(piece.text)] if piece.text else []
        else:
            deltas = self._reasoning.push(piece.text)
            self._count(piece)
            if piece.finish_reason:
                deltas += self._reasoning.finish()
        if self._tools is None:
            return deltas
        read: list[MessageDelta] = []
        for delta in deltas:
            read += self._tools.push(delta.text) if isinstance(delta, Content) else [delta]
        return read + self._tools.finish() if piece.finish_reason else read

    def _count(self, piece: ChoiceDelta) -> None:
        ids, close_id = piece.token_ids, self._close_id
        if not self._closed and close_id is not None:
            self._closed = close_id in ids
            self._until_close += ids.index(close_id) + 1 if self._closed else len(ids)

    def finish_reason(self, reason: str) -> str:
        """How a choice that ended so ended as a message."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason


class Call(Struct):
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str = ""


class Message(Struct):
    """A whole message; content is None where there is none beside calls or thoughts."""

    content: str | None
    reasoning: str | None
    calls: list[Call]


def whole_message(deltas: list[MessageDelta]) -> Message:
    """All deltas of a choice together."""
    content = "".join([delta.text for delta in deltas if isinstance(delta, Content)])
    reasoning = "".join([delta.text for delta in deltas if isinstance(delta, Reasoning)])
    calls = [Call(delta.id, delta.name) for delta in deltas if isinstance(delta, CallStart)]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            calls[delta.index].arguments += delta.text
    return Message(content if content or not (calls or reasoning) else None, reasoning or None, calls)
