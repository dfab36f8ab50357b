"""Find tool calls at the end of reasoning.

Models that reason before they call a tool, such as Qwen3.5, at times write the call without closing their reasoning.
"""

from collections.abc import Callable

from tandem.frontend.chat.message import Content, MessageDelta
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.generation.output_tags import TagToken, partial_length


class ThoughtCalls:
    """Hold back what may be calls at the end of reasoning.

    Calls that are followed by other reasoning are part of it. The result does not depend on how the text is chunked.
    """

    def __init__(self, new_parser: Callable[[], ToolParser], trigger: str, is_token: bool) -> None:
        """Store the settings.

        trigger: text before a call; is_token: only its token announces calls, not its characters.
        """
        self._new_parser = new_parser
        self._trigger = trigger
        self._is_token = is_token
        self._parser: ToolParser | None = None
        """Parser of the held text; None while this is at most the beginning of a trigger."""
        self._held = ""
        self._deltas: list[MessageDelta] = []
        """Calls in the held text."""

    def push(self, text: str, token: TagToken | None, shown: str) -> str:
        """Return the reasoning that is not held back. token, shown: as in `ReasoningParser.push`."""
        parts: list[str] = []
        if token is not None:
            self._push_tag(text, shown, parts)
            return "".join(parts)
        at = 0
        while at < len(text):
            if self._parser is not None:
                self._keep(self._parser.push(text[at]), text[at], parts)
                at += 1
            else:
                at += self._find_trigger(text[at:], parts)
        return "".join(parts)

    def take_text(self) -> str:
        """Return the held text as reasoning."""
        held, self._held = self._held, ""
        self._parser, self._deltas = None, []
        return held

    def take_calls(self) -> tuple[ToolParser | None, list[MessageDelta]]:
        """Return the calls that the held text consists of, and their parser, or None if it is reasoning."""
        parser, deltas = self._parser, self._deltas
        if parser is None or not parser.ends_with_call:
            return None, []
        self.take_text()
        return parser, deltas

    def _find_trigger(self, text: str, parts: list[str]) -> int:
        """Hold back a trigger or the beginning of one at the end; return the number of characters that were read."""
        if self._is_token:
            parts.append(text)
            return len(text)
        before = len(self._held)
        found, self._held = self._held + text, ""
        at = found.find(self._trigger)
        if at < 0:
            at = len(found) - partial_length(found, self._trigger)
            parts.append(found[:at])
            self._held = found[at:]
            return len(text)
        parts.append(found[:at])
        self._parser = self._new_parser()
        self._keep(self._parser.push(self._trigger), self._trigger, parts)
        return at + len(self._trigger) - before

    def _push_tag(self, tag: str, shown: str, parts: list[str]) -> None:
        deltas = [] if self._parser is None else self._parser.push_tag(tag, shown)
        if tag == self._trigger and (self._parser is None or _has_content(deltas)):
            parts.append(self.take_text())
            self._parser = self._new_parser()
            deltas = self._parser.push_tag(tag, shown)
        self._keep(deltas, shown, parts)
        if self._parser is None:
            parts.append(self.take_text())

    def _keep(self, deltas: list[MessageDelta], text: str, parts: list[str]) -> None:
        """Hold back a text with its deltas. If it is not part of calls, all that is held is reasoning."""
        self._held += text
        self._deltas += deltas
        if _has_content(deltas):
            held = self.take_text()
            end = len(held) - (0 if self._is_token else partial_length(held, self._trigger))
            parts.append(held[:end])
            self._held = held[end:]


def _has_content(deltas: list[MessageDelta]) -> bool:
    return any(isinstance(delta, Content) for delta in deltas)
