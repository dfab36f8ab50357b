"""Print a streamed response as it arrives, and keep its text, usage and timing."""

import json
import re
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TextIO

# Model output must not set colors or move the cursor.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class StreamedAnswer:
    """Print the events of `/v1/completions` and `/v1/chat/completions`.

    On a terminal, control characters are printed as U+FFFD, reasoning is dimmed, and leading whitespace is dropped; to
    a file or pipe, only the content is written, unchanged.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float]) -> None:
        self.content = ""
        self._out = out
        self._clock = clock
        self._terminal = out.isatty()
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._reasoning = False
        self._begun = False
        """True once text other than whitespace was printed."""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}

    def follow(self, events: Generator[dict[str, Any], None, None]) -> bool:
        """Print all events, and return False if an interrupt stopped them.

        The last line is always completed.
        """
        try:
            with closing(events):
                for event in events:
                    self.push(event)
        except KeyboardInterrupt:
            return False
        finally:
            if self._first is not None:
                self._end_line()
        return True

    def push(self, event: dict[str, Any]) -> None:
        """Print the text of an event, and keep its usage and finish reason."""
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._show(delta.get("reasoning_content"), reasoning=True)
            content = delta.get("content") or choice.get("text")
            # Store the text before printing it: text seen before an interrupt is part of the conversation.
            self.content += content or ""
            self._show(content, reasoning=False)

    def summary(self) -> str:
        """Format the usage and timing as one line."""
        count = self._usage.get("completion_tokens", 0)
        parts = [f"{self._usage.get('prompt_tokens', 0)} tokens in, {count} out"]
        if self._first is not None:
            parts.append(f"first after {self._first - self._started:.2f} s")
            if count > 1 and self._last > self._first:
                parts.append(f"{(count - 1) / (self._last - self._first):.1f} tokens/s")
        parts.append(f"ended by {self._finish_reason}" if self._finish_reason else "stopped")
        return ", ".join(parts)

    def report_cut(self, as_json: bool) -> int:
        """Print a note on stderr if the token limit truncated the answer; return the exit code.

        With `as_json` the answer should be JSON, and 1 is returned if it is truncated.
        """
        if self._finish_reason != "length":
            return 0
        count = self._usage.get("completion_tokens")
        limit = "at the limit on tokens" if count is None else f"at {count} tokens"
        if as_json and not _is_json(self.content):
            print(f"tandem: the JSON was cut {limit} and is not complete; raise --max-tokens", file=sys.stderr)
            return 1
        print(f"tandem: cut {limit}; raise --max-tokens", file=sys.stderr)
        return 0

    def _end_line(self) -> None:
        self._set_reasoning(False)
        if not self.content.endswith("\n"):
            self._out.write("\n")
        self._out.flush()

    def _show(self, text: str | None, reasoning: bool) -> None:
        if not text:
            return
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        if reasoning and not self._terminal:
            return
        self._set_reasoning(reasoning)
        if self._terminal and not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._out.write(_CONTROLS.sub("\ufffd", text) if self._terminal else text)
        self._out.flush()

    def _set_reasoning(self, reasoning: bool) -> None:
        if reasoning != self._reasoning:
            self._reasoning = reasoning
            self._begun = False
            self._out.write("\x1b[2m" if reasoning else "\x1b[0m\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
