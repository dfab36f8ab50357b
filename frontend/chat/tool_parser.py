"""Text in, content and calls out, streamed: however the text is cut, what comes out joins to the same.

That is so because every decision falls at a character, on what came before it. Text that looked like a call and is
none, one of a function that the request does not have included, is content after all.
"""

import secrets
import string
from collections.abc import Set
from enum import Enum

from tandem.frontend.chat.message import (
    BLANK,
    MAX_BLANKS,
    CallArguments,
    CallStart,
    Content,
    MessageDelta,
    count_blanks_before,
    holdback_length,
)
from tandem.frontend.chat.tool_call import CallReader, State
from tandem.frontend.chat.tool_formats import ToolFormat

_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ID_LETTERS = string.ascii_letters + string.digits


class _Mode(Enum):
    TEXT = "text"
    START = "start"
    """A call was announced, or may begin without a word: blanks, perhaps a bracket, then a brace."""
    CALL = "call"
    AFTER = "after"
    """A call has ended; what closes it, another, or text may follow."""


class ToolParser:
    """Reads the text of one choice. With `parallel` off, calls after the first are dropped.

    `required` says that a grammar allows nothing but calls, so that what does not end is a call that was cut.
    """

    def __init__(self, form: ToolFormat, names: Set[str], parallel: bool = True, required: bool = False) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._parallel = parallel
        self._required = required
        self._trigger = form.syntax.trigger
        self._closer = form.syntax.after.strip()
        self._mode = _Mode.TEXT if self._trigger else _Mode.START
        self._held = ""
        """Text that may yet belong to a call, or to blanks around one."""
        self._blanks = 0
        """Seen beside what is looked for."""
        self._closing = ""
        """What there is of the closer."""
        self._separated = False
        """Whether a comma or the like has followed the last call."""
        self._in_array = False
        self._reader: CallReader | None = None
        self._out: list[MessageDelta] = []

    def push(self, text: str) -> list[MessageDelta]:
        """What this text adds, as far as that is known."""
        rest = text
        while rest:
            match self._mode:
                case _Mode.TEXT:
                    rest = self._in_text(rest)
                case _Mode.START:
                    rest = self._at_start(rest)
                case _Mode.CALL:
                    rest = self._in_call(rest)
                case _Mode.AFTER:
                    rest = self._after_call(rest)
        return self._taken()

    def finish(self) -> list[MessageDelta]:
        """What was held back, at the end of the text. A call that had begun stays as far as it came."""
        if self._required:
            self._cut()
            return self._taken()
        if self._reader is not None and self._reader.name is None:
            self._give_up("")
        held, self._held = self._held, ""
        if not (self.num_calls and not held.strip(BLANK)):
            self._content(held)
        return self._taken()

    def _cut(self) -> None:
        """Shows the name of a call that has no arguments yet. What comes ahead of it, or closes a call, is no text."""
        reader, self._held = self._reader, ""
        if reader is not None and reader.name is None:
            reader.cut()
            if reader.name is not None:
                self._announce(reader.name)

    def _taken(self) -> list[MessageDelta]:
        out, self._out = self._out, []
        return out

    def _content(self, text: str) -> None:
        if text:
            self._out.append(Content(text))

    def _in_text(self, text: str) -> str:
        """Shows text up to the trigger; holds back what may be the trigger's beginning, and blanks ahead of it."""
        if not self._trigger:
            self._content(text)
            return ""
        text, self._held = self._held + text, ""
        at = text.find(self._trigger)
        if at >= 0:
            shown, end = at - count_blanks_before(text, at), at + len(self._trigger)
            self._mode = _Mode.START
        else:
            shown, end = len(text) - holdback_length(text, self._trigger), len(text)
        self._content(text[:shown])
        self._held = text[shown:end]
        self._blanks = 0
        return text[end:]

    def _at_start(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._is_blank(character) or self._opens_array(character):
                self._held += character
            elif character == "{":
                self._reader = CallReader(self._names, _ARGUMENT_KEYS)
                self._mode = _Mode.CALL
                return text[index + 1 :]
            else:
                return self._give_up(text[index:])
        return ""

    def _is_blank(self, character: str) -> bool:
        """Whether this is a blank, and one of not too many."""
        self._blanks += character in BLANK
        return character in BLANK and self._blanks <= MAX_BLANKS

    def _opens_array(self, character: str) -> bool:
        opens = character == "[" and not self._in_array and not self._closer
        self._in_array = self._in_array or opens
        return opens

    def _give_up(self, rest: str) -> str:
        """No call after all: what was held is content, and the rest is looked at as text."""
        held, self._held = self._held, ""
        self._content(held + "".join(self._reader.raw if self._reader else ()))
        self._mode, self._in_array, self._reader = _Mode.TEXT, False, None
        return rest

    def _in_call(self, text: str) -> str:
        reader = self._reader
        assert reader is not None, f"in a call without a reader: {self._held!r}"
        for index, character in enumerate(text):
            announced = reader.name is not None
            if not reader.push(character):
                if not announced:
                    return self._give_up(text[index:])
                self._end_call()
                return text[index:]
            if reader.name is not None and not announced:
                self._announce(reader.name)
            if reader.state is State.DONE:
                self._end_call()
                return text[index + 1 :]
        self._arguments(reader)
        return ""

    def _announce(self, name: str) -> None:
        self._held = ""
        if self._parallel or not self.num_calls:
            self._out.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _arguments(self, reader: CallReader) -> None:
        text = reader.take_arguments()
        if text and (self._parallel or self.num_calls == 1):
            self._out.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        assert self._reader is not None
        self._arguments(self._reader)
        self._reader = None
        self._mode = _Mode.AFTER
        self._blanks, self._closing, self._separated = 0, "", False

    def _after_call(self, text: str) -> str:
        """Swallows what closes a call; finds the next one where no trigger announces it."""
        for index, character in enumerate(text):
            if self._closer:
                self._held += character
                if not self._in_closer(character):
                    self._mode = _Mode.TEXT
                    return text[index + 1 :]
            elif self._is_blank(character) or self._separates(character):
                self._held += character
            elif character == "]" and self._in_array:
                self._held, self._in_array, self._blanks, self._separated = "", False, 0, False
            elif character == "{":
                self._mode = _Mode.START
                return text[index:]
            elif self._trigger:
                self._mode = _Mode.TEXT
                return text[index:]
            else:
                return self._give_up(text[index:])
        return ""

    def _in_closer(self, character: str) -> bool:
        """Takes a character behind a call; false once the closer is complete, or cannot be any more: then what is
        held is text."""
        if not self._closing and self._is_blank(character):
            return True
        self._closing += character
        if self._closing == self._closer:
            self._held = ""
            return False
        return self._closer.startswith(self._closing)

    def _separates(self, character: str) -> bool:
        separates = character in ",;" and not self._separated
        self._separated = self._separated or separates
        return separates

    def _new_id(self) -> str:
        form = self._form
        return form.id_prefix + "".join(secrets.choice(_ID_LETTERS) for _ in range(form.id_chars))
