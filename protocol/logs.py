"""Log lines of every process, as text or as JSON.

Each has a time, a process, a level and a message. Nothing that a client sent reaches a terminal as it is: text escapes
what is not printable, so a message stays one line, and indents the lines of a traceback, and those of a refusal but the
first, so none of them looks like a message.
"""

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
"""Least severe level that is written."""
LogFormat = Literal["text", "json"]
"""Form of the lines: text for people, or one JSON object a line."""
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

ACCESS_LOGGER, AUDIT_LOGGER, REQUESTS_LOGGER = "tandem.access", "tandem.audit", "tandem.requests"
"""Loggers with lines that are records of their own; in text they bear the logger's name."""
_NAMED = frozenset((ACCESS_LOGGER, AUDIT_LOGGER, REQUESTS_LOGGER))
_FIELDS = "fields"
"""Attribute of a log record under which `with_fields` puts its fields."""
_TRACE = "trace"
"""Attribute of a log record under which `without_message` puts a traceback."""
_LINES = "lines"
"""Attribute of the log record of a refusal, which may have several lines."""
_MAX_CAUSES = 8
_INDENT = "    "
_WORD = re.compile(r"[A-Za-z0-9._:/,+@*{}\[\]-]+")

_QUIET = {
    "asyncio": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "opentelemetry": logging.WARNING,
    "urllib3": logging.WARNING,
}
"""Minimum levels of libraries' loggers, unless the level is debug."""

logger = logging.getLogger(__name__)


def printable(text: str) -> str:
    """Escape whatever is not printable in a text, such as control characters."""
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode() for char in text])


def field_text(value: object) -> str:
    """Return the value of a field, in quotes unless it is a plain word."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if _WORD.fullmatch(text):
        return text
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def with_fields(**fields: object) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log call that gives its line fields.

    They follow the message as `name=value`, or are members of the JSON object. Those that are None are left out.
    """
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


def without_message(error: BaseException) -> dict[str, str]:
    """Return the `extra` of a log call that omits an error's message.

    Its line has the traceback. The message of an error that a request causes may repeat a part of the request, which
    is not to be logged.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _MAX_CAUSES:
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(
            f"Traceback (most recent call last):\n{frames}{type(current).__name__}: (its message is not logged)"
        )
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return {_TRACE: "\nwhich was caused by\n".join(parts)}


class Timestamps:
    """Clock of the log: UTC to the millisecond, in the format of RFC 3339."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def at(self, seconds: float) -> str:
        """Return the text of a Unix time."""
        second = int(seconds)
        if second != self._second:
            # Two threads may both do this, with the same result.
            self._text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._text}.{int((seconds - second) * 1000):03d}Z"


class LineHandler(logging.StreamHandler[TextIO]):
    """Handler that writes each record as a line of the log of one process."""

    def __init__(self, process: str, log_format: LogFormat, stream: TextIO) -> None:
        super().__init__(stream)
        self.process = process
        self.log_format = log_format
        self.timestamps = Timestamps()

    def write_line(self, line: str) -> None:
        """Write a line that is complete, but for its end."""
        self.acquire()
        try:
            self.stream.write(line + "\n")
            if not getattr(self.stream, "line_buffering", False):
                self.stream.flush()
        except (OSError, ValueError):  # a log that cannot be written ends nothing
            pass
        finally:
            self.release()

    def format(self, record: logging.LogRecord) -> str:
        stamp, message = self.timestamps.at(record.created), record.getMessage()
        fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
        trace = self._trace(record)
        if self.log_format == "json":
            return self._json(stamp, record, message, fields, trace)
        name = f"{record.name}: " if record.name in _NAMED else ""
        first, *rest = message.split("\n") if hasattr(record, _LINES) else [message]
        parts = [f"{stamp} {self.process} {record.levelname} {name}{printable(first)}"]
        parts += [f" {field}={field_text(value)}" for field, value in fields.items()]
        parts += ["\n" + _INDENT + printable(line) for line in [*rest, *trace.splitlines()]]
        return "".join(parts)

    def _json(self, stamp: str, record: logging.LogRecord, message: str, fields: Mapping[str, Any], trace: str) -> str:
        line = {
            "time": stamp,
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": message,
            **fields,
        }
        if trace:
            line["exception"] = trace
        return json_line(line)

    @staticmethod
    def _trace(record: logging.LogRecord) -> str:
        """Return the traceback of a record, and the stack that it was asked for."""
        parts = [getattr(record, _TRACE)] if hasattr(record, _TRACE) else []
        if record.exc_info and record.exc_info[0] is not None:
            parts.append(logging.Formatter().formatException(record.exc_info))
        if record.stack_info:
            parts.append(record.stack_info)
        return "\n".join(parts)


def json_line(line: Any) -> str:
    """Encode an object as one line of ASCII."""
    try:
        text = msgspec.json.encode(line).decode()
    except (TypeError, UnicodeEncodeError):  # half of a surrogate pair, or a value that JSON does not have
        return json.dumps(line, default=str)
    return text if text.isascii() else json.dumps(msgspec.json.decode(text))


def configure_logging(process: str, level: LogLevel, log_format: LogFormat = "text") -> None:
    """Write the log of this process to stderr.

    `process` names it in each line, because all processes of a service share one terminal. An uncaught exception
    becomes a line of the log as well. A process that already has a log handler is left unchanged.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(LineHandler(process, log_format, sys.stderr))
        root.setLevel(level.upper())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    _quieten(level)


def set_log_level(level: LogLevel) -> None:
    """Set the minimum level of log lines."""
    logging.getLogger().setLevel(level.upper())
    _quieten(level)


def _quieten(level: LogLevel) -> None:
    for name, least in _QUIET.items():
        limit = logging.NOTSET if level == "debug" else max(least, getattr(logging, level.upper()))
        logging.getLogger(name).setLevel(limit)


def line_handler() -> LineHandler | None:
    """Return the handler that `configure_logging` has set up.

    None in a process that logs in its own way.
    """
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)), None)


def announce(text: str, rows: Mapping[str, str] | None = None, **fields: object) -> None:
    """Print a line for people and scripts that wait for it; in the log if that is JSON.

    rows: names and texts of further lines, which are fields of the JSON object; fields: more of them.
    """
    rows = rows or {}
    if _is_json():
        logger.info("%s", text, extra=with_fields(**rows, **fields))
    else:
        print("\n".join([text, *(f"  {name:<10}  {value}" for name, value in rows.items())]), flush=True)


def refuse(program: str, reason: str, is_child: bool = False) -> None:
    """Print to stderr why a program does not run.

    It is a line of the log if that is JSON, or if the program is a child process of a service.
    """
    if is_child or _is_json():
        logger.error("%s", reason, extra={_LINES: True})
    else:
        print(f"{program}: {reason}", file=sys.stderr)


def _is_json() -> bool:
    handler = line_handler()
    return handler is not None and handler.log_format == "json"


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), trace)
        return
    logger.critical("an exception was not handled", exc_info=(kind, error, trace))
