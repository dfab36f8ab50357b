"""Thoughts between `<think>` and `</think>`, told apart from the answer while they stream."""

from enum import Enum

from tandem.frontend.chat.deltas import Content, MessageDelta, Reasoning
from tandem.frontend.chat.held_text import BLANK, MAX_BLANKS, blanks_before, held_length
from tandem.frontend.grammar.tags import CLOSE, OPEN


class _Mode(Enum):
    START = "start"
    """Blanks, perhaps the opening tag."""
    THOUGHTS = "thoughts"
    BETWEEN = "between"
    """Blanks behind the closing tag."""
    ANSWER = "answer"


class ReasoningParser:
    """Reads the text of one choice. Thoughts are at its beginning or nowhere; blanks at their edges are dropped.

    `opened` says that the prompt has opened them already. What never closes is thoughts to the end.
    """

    def __init__(self, opened: bool) -> None:
        self._mode = _Mode.THOUGHTS if opened else _Mode.START
        self._held = ""
        self._thought = opened
        self._begun = False
        """Whether any thought has been shown."""

    @property
    def thought(self) -> bool:
        """Whether there have been thoughts, if only empty ones."""
        return self._thought

    def push(self, text: str) -> list[MessageDelta]:
        text, self._held = self._held + text, ""
        shown: list[MessageDelta] = []
        if self._mode is _Mode.START:
            text = self._at_start(text)
        if self._mode is _Mode.THOUGHTS:
            text = self._in_thoughts(text, shown)
        if self._mode is _Mode.BETWEEN:
            text = text.lstrip(BLANK)
            if text:
                self._mode = _Mode.ANSWER
        if self._mode is _Mode.ANSWER and text:
            shown.append(Content(text))
        return shown

    def finish(self) -> list[MessageDelta]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        if self._mode is _Mode.THOUGHTS:
            held = held[: len(held) - blanks_before(held, len(held))]
            return [Reasoning(held)] if held else []
        return [Content(held)] if held else []

    def _at_start(self, text: str) -> str:
        """Decides whether there are thoughts; returns what is left to be read."""
        start = text.lstrip(BLANK)
        few = len(text) - len(start) <= MAX_BLANKS
        if start.startswith(OPEN) and few:
            self._mode, self._thought = _Mode.THOUGHTS, True
            return start[len(OPEN) :]
        if OPEN.startswith(start) and few:
            self._held = text
            return ""
        self._mode = _Mode.ANSWER
        return text

    def _in_thoughts(self, text: str, shown: list[MessageDelta]) -> str:
        """Shows thoughts; returns what follows them."""
        if not self._begun:
            text = text.lstrip(BLANK)
        at = text.find(CLOSE)
        thoughts = text[: len(text) - held_length(text, CLOSE) if at < 0 else at - blanks_before(text, at)]
        if thoughts:
            shown.append(Reasoning(thoughts))
            self._begun = True
        if at < 0:
            self._held = text[len(thoughts) :]
            return ""
        self._mode = _Mode.BETWEEN
        return text[at + len(CLOSE) :]


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends where thoughts begin."""
    return prompt.rstrip(BLANK).endswith(OPEN)
