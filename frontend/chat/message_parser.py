"""Parse the text of a choice into an assistant's message.

Reasoning is parsed first, then content and tool calls.
"""

from enum import Enum

from msgspec import Struct

from tandem.frontend.chat.message import (
    BLANK,
    MAX_BLANKS,
    Content,
    MessageDelta,
    Reasoning,
    count_blanks_before,
    holdback_length,
)
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.grammar.grammar import THINK_END, THINK_START, ThinkingMode
from tandem.frontend.request.tools import ToolUse


class MessageShape(Struct, frozen=True):
    """The kinds of output besides content that a request's choices may contain."""

    tool_use: ToolUse = ToolUse()
    tool_format: ToolFormat | None = None
    """Format of tool calls; None when calls are not parsed."""
    thinking: ThinkingMode = ThinkingMode.NONE
    think_end_id: int | None = None
    """Id of the token that ends reasoning; None if the tag is not a single token."""

    @property
    def is_content_only(self) -> bool:
        """Tell whether all output is content, so that nothing has to be parsed."""
        return self.tool_format is None and self.thinking is ThinkingMode.NONE

    def new_parser(self) -> "MessageParser":
        """Create the parser of one choice."""
        reasoning: ReasoningParser | None = None
        if self.thinking is not ThinkingMode.NONE:
            reasoning = ReasoningParser(self.thinking is ThinkingMode.OPEN)
        tools: ToolParser | None = None
        if self.tool_format is not None:
            names = frozenset(tool.name for tool in self.tool_use.tools)
            required = self.tool_use.choice.mode == "required"
            tools = ToolParser(self.tool_format, names, self.tool_use.parallel, required)
        return MessageParser(reasoning, tools, self.think_end_id)


class MessageParser:
    """Turn the text of one choice into deltas of a message."""

    def __init__(
        self,
        reasoning: "ReasoningParser | None" = None,
        tools: ToolParser | None = None,
        think_end_id: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._think_end_id = think_end_id
        self._num_reasoning_tokens = 0
        self._think_ended = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Count the tokens up to and including the end of the reasoning.

        The count is None if no single token ends the reasoning.
        """
        if self._reasoning is None or not self._reasoning.has_started:
            return 0
        return None if self._think_end_id is None else self._num_reasoning_tokens

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, delta: ChoiceDelta) -> list[MessageDelta]:
        """Parse a delta of a choice.

        A delta with a finish reason also releases the text that was held back.
        """
        if self._reasoning is None:
            deltas: list[MessageDelta] = [Content(delta.text)] if delta.text else []
        else:
            deltas = self._reasoning.push(delta.text)
            self._count_reasoning(delta)
            if delta.finish_reason:
                deltas += self._reasoning.finish()
        if self._tools is None:
            return deltas
        parsed: list[MessageDelta] = []
        for part in deltas:
            parsed += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return parsed + self._tools.finish() if delta.finish_reason else parsed

    def _count_reasoning(self, delta: ChoiceDelta) -> None:
        ids, end_id = delta.token_ids, self._think_end_id
        if not self._think_ended and end_id is not None:
            self._think_ended = end_id in ids
            self._num_reasoning_tokens += ids.index(end_id) + 1 if self._think_ended else len(ids)

    def finish_reason(self, reason: str) -> str:
        """Translate the finish reason of a choice to that of its message.

        A message that stopped after calls ends with "tool_calls".
        """
        return "tool_calls" if self.num_calls and reason == "stop" else reason


class _Mode(Enum):
    START = "start"
    """State before any text but blanks and perhaps part of the opening tag."""
    REASONING = "reasoning"
    AFTER_END = "after_end"
    """State within the blanks that follow the closing tag."""
    ANSWER = "answer"


class ReasoningParser:
    """Separate reasoning, `<think>...</think>`, from the answer that follows it.

    Reasoning is only recognized at the start of a choice; blanks at its edges are dropped. With `opened`, the prompt
    ended with the opening tag. Reasoning that is never closed extends to the end of the text.
    """

    def __init__(self, opened: bool) -> None:
        self._mode = _Mode.REASONING if opened else _Mode.START
        self._held = ""
        self._has_started = opened
        self._has_text = False
        """True once non-blank reasoning has been returned."""

    @property
    def has_started(self) -> bool:
        """Tell whether the choice contains reasoning, even if it is empty."""
        return self._has_started

    def push(self, text: str) -> list[MessageDelta]:
        """Parse the next text of the choice; text that may belong to a tag is held back."""
        text, self._held = self._held + text, ""
        deltas: list[MessageDelta] = []
        if self._mode is _Mode.START:
            text = self._parse_start(text)
        if self._mode is _Mode.REASONING:
            text = self._parse_reasoning(text, deltas)
        if self._mode is _Mode.AFTER_END:
            text = text.lstrip(BLANK)
            if text:
                self._mode = _Mode.ANSWER
        if self._mode is _Mode.ANSWER and text:
            deltas.append(Content(text))
        return deltas

    def finish(self) -> list[MessageDelta]:
        """Release the text that was held back, at the end of the choice."""
        held, self._held = self._held, ""
        if self._mode is _Mode.REASONING:
            held = held[: len(held) - count_blanks_before(held, len(held))]
            return [Reasoning(held)] if held else []
        return [Content(held)] if held else []

    def _parse_start(self, text: str) -> str:
        """Decide whether the choice starts with reasoning.

        Returns the text that remains to be parsed.
        """
        start = text.lstrip(BLANK)
        few_blanks = len(text) - len(start) <= MAX_BLANKS
        if start.startswith(THINK_START) and few_blanks:
            self._mode, self._has_started = _Mode.REASONING, True
            return start[len(THINK_START) :]
        if THINK_START.startswith(start) and few_blanks:
            self._held = text
            return ""
        self._mode = _Mode.ANSWER
        return text

    def _parse_reasoning(self, text: str, deltas: list[MessageDelta]) -> str:
        """Append the reasoning to `deltas`; return the text that follows the closing tag."""
        if not self._has_text:
            text = text.lstrip(BLANK)
        at = text.find(THINK_END)
        end = len(text) - holdback_length(text, THINK_END) if at < 0 else at - count_blanks_before(text, at)
        if end:
            deltas.append(Reasoning(text[:end]))
            self._has_text = True
        if at < 0:
            self._held = text[end:]
            return ""
        self._mode = _Mode.AFTER_END
        return text[at + len(THINK_END) :]


def prompt_opens_thinking(prompt: str) -> bool:
    """Tell whether a prompt ends with the opening tag of reasoning."""
    return prompt.rstrip(BLANK).endswith(THINK_START)
