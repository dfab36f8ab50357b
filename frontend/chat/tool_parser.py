"""Parse streamed text into content and tool calls.

The result does not depend on how the text is split into chunks: decisions are made per character. Text that looks like
a call but is not one, including a call of an unknown function, is content. Incomplete syntax after a complete call at
the end of the text is dropped.
"""

import secrets
import string
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

from tandem.frontend.chat.message import (
    CallArguments,
    CallStart,
    Content,
    MessageDelta,
    count_blanks_before,
    holdback_length,
)
from tandem.frontend.chat.tool_call import CallParser, CallState, NamedCallParser
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.xml_call import FUNCTION, XmlCallParser
from tandem.frontend.generation.output_tags import BLANK, MAX_BLANKS

_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ID_LETTERS = string.ascii_letters + string.digits


class _Mode(Enum):
    TEXT = "text"
    START = "start"
    """Before a call that was triggered or needs no trigger: blanks, an optional bracket, then a brace."""
    CALL = "call"
    AFTER = "after"
    """After a call: its closing literal, another call or text may follow."""


class ToolParser:
    """Parse the text of one choice into content and tool calls.

    `names` are the tools of the request. Without `parallel`, calls after the first are dropped. With `required`, a
    grammar only allows calls, so an incomplete object at the end of the text is a truncated call. With `is_token`, only
    the token of the trigger tag announces calls, not its characters. `schemas` are the schemas of the tools' arguments,
    for formats without JSON.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Set[str],
        parallel: bool = True,
        required: bool = False,
        is_token: bool = False,
        schemas: Mapping[str, dict[str, Any] | None] | None = None,
    ) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._schemas = schemas or {}
        self._parallel = parallel
        self._required = required
        self._tag = tool_format.syntax.announcement
        self._trigger = "" if is_token else self._tag
        """Trigger tag, if its characters announce calls."""
        self._needs_tag = bool(tool_format.syntax.trigger)
        self._closer = tool_format.syntax.after.strip()
        self._mode = _Mode.TEXT if self._needs_tag else _Mode.START
        self._held = ""
        """Text held back because it may belong to a call or the blanks around it."""
        self._num_blanks = 0
        """Number of blanks in the current mode."""
        self._closing = ""
        """Prefix of the closing literal read so far."""
        self._separated = False
        """True if a separator has followed the last call."""
        self._in_array = False
        self._call: CallParser | NamedCallParser | XmlCallParser | None = None
        self._ids: set[str] = set()
        self._follows_call = False
        """True while only call syntax has followed a complete call."""
        self._deltas: list[MessageDelta] = []

    @property
    def ends_with_call(self) -> bool:
        """Return True if only syntax of calls has followed a complete call."""
        return self._follows_call

    def push(self, text: str) -> list[MessageDelta]:
        """Parse the next text of the choice; text that may belong to a call is held back."""
        self._parse(text)
        return self._take_deltas()

    def push_tag(self, tag: str, shown: str) -> list[MessageDelta]:
        """Parse a tag that is a token; `shown` is its output if it is not part of a call."""
        if self._call is not None:
            if self._call.takes_tag(tag):
                num_raw = len(self._call.raw)
                self._parse(tag)
                if not shown and self._call is not None:
                    del self._call.raw[num_raw:]
                return self._take_deltas()
            if self._call.name is None:
                self._give_up("")
            else:
                self._end_call()
        if tag == self._tag:
            if self._mode is _Mode.START:
                self._give_up("")
            elif self._mode is _Mode.AFTER:
                self._held = ""
            blanks = count_blanks_before(self._held, len(self._held))
            self._add_content(self._held[: len(self._held) - blanks])
            self._held = self._held[len(self._held) - blanks :] + shown
            self._mode, self._num_blanks, self._in_array = _Mode.START, 0, False
        elif tag == self._closer and self._mode is _Mode.AFTER:
            self._parse(tag)
        elif shown:
            if self._mode is not _Mode.TEXT:
                self._give_up("")
            self._parse(shown)
        return self._take_deltas()

    def _parse(self, text: str) -> None:
        rest = text
        while rest:
            match self._mode:
                case _Mode.TEXT:
                    rest = self._parse_text(rest)
                case _Mode.START:
                    rest = self._parse_start(rest)
                case _Mode.CALL:
                    rest = self._parse_call(rest)
                case _Mode.AFTER:
                    rest = self._parse_after_call(rest)

    def finish(self) -> list[MessageDelta]:
        """Flush the text that was held back at the end of the choice.

        A truncated call stays truncated.
        """
        if self._required:
            self._cut()
            return self._take_deltas()
        if self._follows_call:
            return self._take_deltas()
        if self._call is not None and self._call.name is None:
            self._give_up("")
        held, self._held = self._held, ""
        if not (self.num_calls and not held.strip(BLANK)):
            self._add_content(held)
        return self._take_deltas()

    def _cut(self) -> None:
        """Start a truncated call that has no arguments yet.

        Held text is dropped, because it belongs to the call's syntax.
        """
        call, self._held = self._call, ""
        if call is not None and call.name is None:
            call.cut()
            if call.name is not None:
                self._start_call(call.name, call.id)

    def _take_deltas(self) -> list[MessageDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add_content(self, text: str) -> None:
        if text:
            self._follows_call = False
            self._deltas.append(Content(text))

    def _parse_text(self, text: str) -> str:
        """Emit text up to the trigger as content; hold back a partial trigger and the blanks before it."""
        if not self._trigger:
            # Blanks before the tag belong to it.
            text, self._held = self._held + text, ""
            shown = len(text) - (count_blanks_before(text, len(text)) if self._tag else 0)
            self._add_content(text[:shown])
            self._held = text[shown:]
            return ""
        text, self._held = self._held + text, ""
        at = text.find(self._trigger)
        if at >= 0:
            shown, end = at - count_blanks_before(text, at), at + len(self._trigger)
            self._mode = _Mode.START
        else:
            shown, end = len(text) - holdback_length(text, self._trigger), len(text)
        self._add_content(text[:shown])
        self._held = text[shown:end]
        self._num_blanks = 0
        return text[end:]

    def _parse_start(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._is_blank(character) or self._opens_array(character):
                self._held += character
            elif character == "{":
                self._call = CallParser(self._names, _ARGUMENT_KEYS)
                self._mode = _Mode.CALL
                return text[index + 1 :]
            elif character == "<" and self._format.syntax.is_xml:
                self._call = XmlCallParser(self._names, self._schemas)
                self._mode = _Mode.CALL
                return text[index:]
            elif self._format.reads_names and not self._in_array and character != "[":
                self._call = NamedCallParser(self._names)
                self._mode = _Mode.CALL
                return text[index:]
            else:
                return self._give_up(text[index:])
        return ""

    def _is_blank(self, character: str) -> bool:
        """Return True if a character is one of the first MAX_BLANKS blanks of this mode."""
        self._num_blanks += character in BLANK
        return character in BLANK and self._num_blanks <= MAX_BLANKS

    def _opens_array(self, character: str) -> bool:
        opens = character == "[" and not self._in_array and not self._closer
        self._in_array = self._in_array or opens
        return opens

    def _give_up(self, rest: str) -> str:
        """Emit the held text as content, because it is not a call.

        Returns the rest, to be parsed as text.
        """
        held, self._held = self._held + "".join(self._call.raw if self._call else ()), ""
        if self._tag and not held.strip(BLANK):
            self._held = held  # blanks before a tag are dropped with it
        else:
            end = len(held) - (holdback_length(held, self._trigger) if self._trigger else 0)
            self._add_content(held[:end])
            self._held = held[end:]
        self._mode, self._in_array, self._call = _Mode.TEXT, False, None
        return rest

    def _parse_call(self, text: str) -> str:
        call = self._call
        assert call is not None, f"in a call without its parser: {self._held!r}"
        for index, character in enumerate(text):
            started = call.name is not None
            if not call.push(character):
                if not started:
                    return self._give_up(text[index:])
                self._end_call()
                return text[index:]
            if call.name is not None and not started:
                self._start_call(call.name, call.id)
            if call.state is CallState.DONE:
                self._end_call()
                return text[index + 1 :]
        self._add_arguments(call)
        return ""

    def _start_call(self, name: str, given_id: str) -> None:
        self._held, self._follows_call = "", False
        if self._parallel or not self.num_calls:
            is_usable = len(given_id) == self._format.id_chars and given_id not in self._ids
            call_id = given_id if is_usable else self._new_id()
            self._ids.add(call_id)
            self._deltas.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def _add_arguments(self, call: CallParser | NamedCallParser | XmlCallParser) -> None:
        text = call.take_arguments()
        if text and (self._parallel or self.num_calls == 1):
            self._deltas.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        assert self._call is not None, "no call to end"
        self._add_arguments(self._call)
        self._follows_call = self._call.state is CallState.DONE
        self._call = None
        self._mode = _Mode.AFTER
        self._num_blanks, self._closing, self._separated = 0, "", False

    def _parse_after_call(self, text: str) -> str:
        """Drop the closing literal of a call.

        Also finds the next call if it has no trigger.
        """
        for index, character in enumerate(text):
            if self._closer:
                self._held += character
                if not self._in_closer(character):
                    held, self._held = self._held, ""
                    self._mode = _Mode.TEXT
                    rest = held + text[index + 1 :]
                    is_closed = not held
                    return rest if is_closed or not self._format.syntax.is_xml else self._begin_next_function(rest)
            elif self._is_blank(character) or self._separates(character):
                self._held += character
            elif character == "]" and self._in_array:
                self._held, self._in_array, self._num_blanks, self._separated = "", False, 0, False
            elif character == "{":
                self._mode = _Mode.START
                return text[index:]
            elif self._needs_tag:
                self._mode = _Mode.TEXT
                return text[index:]
            else:
                return self._give_up(text[index:])
        return ""

    def _begin_next_function(self, text: str) -> str:
        """Begin a call without a tag of its own, if a text after a call does; returns what is still to be parsed."""
        rest = text.lstrip(BLANK)
        if not rest.startswith(FUNCTION[:2]):
            return text
        self._held = text[: len(text) - len(rest)]
        self._call, self._mode = XmlCallParser(self._names, self._schemas), _Mode.CALL
        return rest

    def _in_closer(self, character: str) -> bool:
        """Consume a character after a call; return True if it continues the closing literal.

        The literal ends if it is complete or cannot be completed; in the latter case the held text is content.
        """
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
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(self._format.id_chars))
        return self._format.id_prefix + letters
