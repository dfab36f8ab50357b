"""Parse the text of a choice into an assistant message: first reasoning, then content and tool calls."""

from functools import partial

from msgspec import Struct

from tandem.frontend.chat.message import Content, MessageDelta, Reasoning, count_blanks_before
from tandem.frontend.chat.thought_calls import ThoughtCalls
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.output_tags import (
    BLANK,
    NO_TAGS,
    OutputTags,
    Part,
    PartKind,
    TagToken,
    ThoughtScanner,
    split_at_tags,
)
from tandem.frontend.grammar.grammar import THINK_TAGS, ThinkingMode, ThinkTags
from tandem.frontend.request.tools import ToolUse


class MessageShape(Struct, frozen=True):
    """Settings for parsing the choices of a request: reasoning and tool calls."""

    tool_use: ToolUse = ToolUse()
    tool_format: ToolFormat | None = None
    """Tool call format; None if calls are not parsed."""
    tags: OutputTags = NO_TAGS
    drops_special: bool = True
    """True if special tokens that are not parsed as tags are dropped."""

    @property
    def is_content_only(self) -> bool:
        """Return True if all output is content, so that no parsing is needed."""
        return self.tool_format is None and self.tags.thinking is ThinkingMode.NONE

    def new_parser(self) -> "MessageParser":
        """Return a new parser for one choice."""
        scanner = self.tags.scanner()
        tools: ToolParser | None = None
        calls: ThoughtCalls | None = None
        if self.tool_format is not None:
            syntax = self.tool_format.syntax
            schemas = {tool.name: tool.parameters for tool in self.tool_use.tools}
            required = self.tool_use.choice.mode == "required"
            is_token = self.tags.token_id(syntax.announcement) is not None
            given = self.tool_format, schemas.keys(), self.tool_use.parallel, required, is_token, schemas
            tools = ToolParser(*given)
            if syntax.trigger:
                calls = ThoughtCalls(partial(ToolParser, *given), syntax.trigger, is_token)
        return MessageParser(
            None if scanner is None else ReasoningParser(scanner, calls),
            tools,
            self.tags.token_id(self.tags.think.end),
            self.drops_special,
        )


class MessageParser:
    """Convert the text of one choice to deltas of a message."""

    def __init__(
        self,
        reasoning: "ReasoningParser | None" = None,
        tools: ToolParser | None = None,
        think_end_id: int | None = None,
        drops_special: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._think_end_id = think_end_id
        self._drops_special = drops_special
        self._num_reasoning_tokens = 0
        self._think_ended = False
        self._has_answer = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the number of tokens up to the end tag of the reasoning, or None if that is not a single token."""
        if self._reasoning is None or not self._reasoning.has_started:
            return 0
        return None if self._think_end_id is None else self._num_reasoning_tokens

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, delta: ChoiceDelta) -> list[MessageDelta]:
        """Parse a delta of a choice.

        A delta with a finish reason also flushes the text that was held back.
        """
        parsed: list[MessageDelta] = []
        for text, token in split_at_tags(delta.text, delta.tags):
            self._push_text(text, token, parsed)
        if self._reasoning is not None:
            self._count_reasoning(delta)
            if delta.finish_reason:
                for text in self._reasoning.finish(parsed):
                    self._push_answer(text, None, parsed)
        if self._tools is not None and delta.finish_reason:
            self._add_answer(self._tools.finish(), parsed)
        if self._reasoning is not None and delta.finish_reason:
            self._end_reasoning(self._reasoning, delta.finish_reason, parsed)
        return parsed

    def _end_reasoning(self, reasoning: "ReasoningParser", finish_reason: str, parsed: list[MessageDelta]) -> None:
        """Add the calls at the end of the reasoning, unless an answer follows."""
        if finish_reason == "stop" and not self._has_answer:
            tools, deltas = reasoning.take_calls()
            if tools is not None:
                self._tools = tools
                parsed += deltas
        reasoning.release(parsed)

    def _push_text(self, text: str, token: TagToken | None, parsed: list[MessageDelta]) -> None:
        if self._reasoning is None:
            self._push_answer(text, token, parsed)
            return
        for part in self._reasoning.push(text, token, self._shown(text, token), parsed):
            self._push_answer(part.text, part.token, parsed)

    def _push_answer(self, text: str, token: TagToken | None, parsed: list[MessageDelta]) -> None:
        if self._tools is not None:
            shown = self._shown(text, token)
            self._add_answer(self._tools.push(text) if token is None else self._tools.push_tag(text, shown), parsed)
        elif shown := self._shown(text, token):
            parsed.append(Content(shown))

    def _add_answer(self, deltas: list[MessageDelta], parsed: list[MessageDelta]) -> None:
        """Append deltas of the answer, before the first of them what was held back of the reasoning."""
        if deltas and not self._has_answer:
            self._has_answer = True
            if self._reasoning is not None:
                self._reasoning.release(parsed)
        parsed += deltas

    def _shown(self, text: str, token: TagToken | None) -> str:
        """Return the text of a tag that is not parsed as one."""
        return "" if token is not None and token.is_special and self._drops_special else text

    def _count_reasoning(self, delta: ChoiceDelta) -> None:
        ids, end_id = delta.token_ids, self._think_end_id
        if not self._think_ended and end_id is not None:
            self._think_ended = end_id in ids
            self._num_reasoning_tokens += ids.index(end_id) + 1 if self._think_ended else len(ids)

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the message: "tool_calls" instead of "stop" if it has calls."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason


class ReasoningParser:
    """Separate reasoning, `<think>...</think>`, from the answer that follows it.

    Reasoning is only recognized at the start of a choice; blanks around it are dropped. `calls` finds calls at its end.
    """

    def __init__(self, scanner: ThoughtScanner, calls: ThoughtCalls | None = None) -> None:
        self._scanner = scanner
        self._calls = calls
        self._blanks = ""
        """Blanks at the end of the reasoning so far."""
        self._has_text = False
        """True once non-blank reasoning has been returned."""

    @property
    def has_started(self) -> bool:
        """Return True if the choice contains reasoning, even if it is empty."""
        return self._scanner.has_thought

    def push(self, text: str, token: TagToken | None, shown: str, deltas: list[MessageDelta]) -> list[Part]:
        """Append the reasoning of the next text to `deltas`; return the parts of the answer.

        The text is plain or a tag; `shown` is the output for a tag that does not end the reasoning.
        """
        answer: list[Part] = []
        for part in self._scanner.push(text, token):
            if part.kind is PartKind.ANSWER:
                answer.append(part)
            elif part.kind is PartKind.THOUGHT:
                self._add(part, shown, deltas)
        return answer

    def finish(self, deltas: list[MessageDelta]) -> list[str]:
        """Flush the text that was held back at the end of the choice; return the parts of the answer."""
        answer: list[str] = []
        for part in self._scanner.finish():
            if part.kind is PartKind.ANSWER:
                answer.append(part.text)
            else:
                self._add(part, part.text, deltas)
        return answer

    def take_calls(self) -> tuple[ToolParser | None, list[MessageDelta]]:
        """Return the calls at the end of the reasoning, and their parser; None if there are none."""
        return (None, []) if self._calls is None else self._calls.take_calls()

    def release(self, deltas: list[MessageDelta]) -> None:
        """Append the reasoning that was held back because it may have been calls."""
        if self._calls is not None:
            self._show(self._calls.take_text(), deltas)

    def _add(self, part: Part, shown: str, deltas: list[MessageDelta]) -> None:
        text = part.text if part.token is None else shown
        self._show(text if self._calls is None else self._calls.push(part.text, part.token, shown), deltas)

    def _show(self, text: str, deltas: list[MessageDelta]) -> None:
        text = self._blanks + text if self._has_text else text.lstrip(BLANK)
        end = len(text) - count_blanks_before(text, len(text))
        self._blanks = text[end:]
        if end:
            deltas.append(Reasoning(text[:end]))
            self._has_text = True


def prompt_opens_thinking(prompt: str, tags: ThinkTags = THINK_TAGS) -> bool:
    """Return True if a prompt ends with the opening tag of reasoning."""
    return prompt.rstrip(BLANK).endswith(tags.start)


def message_opens_thinking(text: str, tags: ThinkTags = THINK_TAGS) -> bool:
    """Return True if an assistant message that is to be continued ends within its reasoning."""
    scanner = ThoughtScanner(tags, opened=False)
    scanner.push(text)
    return scanner.has_thought and not scanner.has_ended
