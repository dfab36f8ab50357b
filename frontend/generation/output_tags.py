"""Tags in the output of a chat, which separate reasoning from the answer.

A tag that is a single token is found by its id: the same characters in other tokens are text. Tags without such a token
are found by their characters.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct, structs

from tandem.frontend.grammar.grammar import THINK_TAGS, ThinkingMode, ThinkTags

BLANK = " \t\r\n"
"""Characters that are dropped next to a tag."""
MAX_BLANKS = 64
"""Maximum whitespace dropped with a tag; a longer run is text.

The limit bounds the text held back if a model emits endless whitespace.
"""


class TagToken(Struct, frozen=True):
    """Tag that is a single token."""

    text: str
    is_special: bool = False
    """True if the token is skipped like other special tokens where it is not parsed as a tag."""


class Tag(Struct, frozen=True):
    """Tag in a text, found by its token."""

    offset: int
    """Index of its first character in the text."""
    token: TagToken

    @property
    def end(self) -> int:
        return self.offset + len(self.token.text)


class OutputTags(Struct, frozen=True):
    """Tags that a request's outputs may contain."""

    tokens: Mapping[int, TagToken] = {}
    """Tags that are a single token, by id."""
    thinking: ThinkingMode = ThinkingMode.NONE
    think: ThinkTags = THINK_TAGS

    def scanner(self) -> "ThoughtScanner | None":
        """Create the splitter of an output; None if outputs have no reasoning."""
        if self.thinking is ThinkingMode.NONE:
            return None
        texts = {token.text for token in self.tokens.values()}
        return ThoughtScanner(
            self.think, self.thinking is ThinkingMode.OPEN, self.think.start in texts, self.think.end in texts
        )

    def token_id(self, text: str) -> int | None:
        """Return the id of a tag's token, or None."""
        return next((token_id for token_id, token in self.tokens.items() if token.text == text), None)


NO_TAGS = OutputTags()


def moved(tags: Sequence[Tag], distance: int) -> list[Tag]:
    """Return tags at offsets increased by `distance`."""
    return [structs.replace(tag, offset=tag.offset + distance) for tag in tags]


def split_at_tags(text: str, tags: Sequence[Tag]) -> Iterator[tuple[str, TagToken | None]]:
    """Yield the parts of a text: plain text with None, and tags with their token."""
    at = 0
    for tag in tags:
        if at < tag.offset:
            yield text[at : tag.offset], None
        yield tag.token.text, tag.token
        at = tag.end
    if at < len(text):
        yield text[at:], None


class PartKind(Enum):
    """Type of a part of an output."""

    TAG = "tag"
    """Tag around reasoning, with the adjacent whitespace that is not part of the answer."""
    THOUGHT = "thought"
    ANSWER = "answer"


class Part(Struct, frozen=True):
    """Consecutive text of one type."""

    kind: PartKind
    text: str
    token: TagToken | None = None
    """Token of the text, if it is a tag found by its token."""


class _State(Enum):
    START = "start"
    """State before any text except whitespace and possibly part of the opening tag."""
    THOUGHT = "thought"
    AFTER_END = "after_end"
    """State within the whitespace after the closing tag."""
    ANSWER = "answer"


class ThoughtScanner:
    """Splitter of the reasoning at the start of an output.

    The parts contain all of the text in order, and do not depend on how it is chunked. With `opened`, the prompt ends
    with the opening tag. Unclosed reasoning extends to the end of the text. `start_is_token` and `end_is_token`: only a
    token counts as the tag.
    """

    def __init__(self, tags: ThinkTags, opened: bool, start_is_token: bool = False, end_is_token: bool = False) -> None:
        self._tags = tags
        self._state = _State.THOUGHT if opened else _State.START
        self._start_is_token = start_is_token
        self._end_is_token = end_is_token
        self._held = ""
        """Text that is not classified yet."""
        self.has_thought = opened
        """True if the output has reasoning, even if it is empty."""

    @property
    def has_ended(self) -> bool:
        """True once the reasoning is closed, or known to be absent."""
        return self._state in (_State.AFTER_END, _State.ANSWER)

    @property
    def is_answer(self) -> bool:
        """True once all further text belongs to the answer."""
        return self._state is _State.ANSWER

    def push(self, text: str, token: TagToken | None = None) -> list[Part]:
        """Classify the next text, which is plain or a tag; text that may be part of a tag is held back."""
        parts: list[Part] = []
        if token is None:
            text, self._held = self._held + text, ""
            if self._state is _State.START:
                text = self._parse_start(text, parts)
            if self._state is _State.THOUGHT:
                text = self._parse_thought(text, parts)
            if self._state is _State.AFTER_END:
                text = self._parse_blanks(text, parts)
            if self._state is _State.ANSWER:
                _add(parts, PartKind.ANSWER, text)
            return parts
        held, self._held = self._held, ""
        if self._state is _State.START and text == self._tags.start:
            self._state, self.has_thought = _State.THOUGHT, True
            _add(parts, PartKind.TAG, held + text)
        elif self._state is _State.THOUGHT:
            _add(parts, PartKind.THOUGHT, held)
            if text == self._tags.end:
                self._state = _State.AFTER_END
                _add(parts, PartKind.TAG, text)
            else:
                _add(parts, PartKind.THOUGHT, text, token)
        else:
            self._state = _State.ANSWER
            _add(parts, PartKind.ANSWER, held)
            _add(parts, PartKind.ANSWER, text, token)
        return parts

    def finish(self) -> list[Part]:
        """Release held back text at the end of the output."""
        held, self._held = self._held, ""
        kind = PartKind.THOUGHT if self._state is _State.THOUGHT else PartKind.ANSWER
        return [Part(kind, held)] if held else []

    def _parse_start(self, text: str, parts: list[Part]) -> str:
        """Decide whether the output starts with reasoning; return the remaining text."""
        start, tag = text.lstrip(BLANK), "" if self._start_is_token else self._tags.start
        num_blanks = len(text) - len(start)
        if num_blanks <= MAX_BLANKS:
            if tag and start.startswith(tag):
                self._state, self.has_thought = _State.THOUGHT, True
                end = num_blanks + len(tag)
                _add(parts, PartKind.TAG, text[:end])
                return text[end:]
            if not start or tag.startswith(start):
                self._held = text
                return ""
        self._state = _State.ANSWER
        return text

    def _parse_thought(self, text: str, parts: list[Part]) -> str:
        """Append the reasoning to `parts`; return the text after the closing tag."""
        tag = self._tags.end
        if self._end_is_token:
            _add(parts, PartKind.THOUGHT, text)
            return ""
        at = text.find(tag)
        if at < 0:
            end = len(text) - partial_length(text, tag)
            _add(parts, PartKind.THOUGHT, text[:end])
            self._held = text[end:]
            return ""
        self._state = _State.AFTER_END
        _add(parts, PartKind.THOUGHT, text[:at])
        _add(parts, PartKind.TAG, tag)
        return text[at + len(tag) :]

    def _parse_blanks(self, text: str, parts: list[Part]) -> str:
        rest = text.lstrip(BLANK)
        _add(parts, PartKind.TAG, text[: len(text) - len(rest)])
        if rest:
            self._state = _State.ANSWER
        return rest


def _add(parts: list[Part], kind: PartKind, text: str, token: TagToken | None = None) -> None:
    if text:
        parts.append(Part(kind, text, token))


def partial_length(text: str, tag: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
