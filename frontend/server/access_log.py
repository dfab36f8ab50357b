"""Access log: one line per request, written when it ends."""

import logging
import time

from msgspec import Struct
from starlette.types import Scope

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.request_scope import ERROR_KEY, request_record
from tandem.frontend.metrics.request_metrics import refusal_reason
from tandem.frontend.server.paths import OTHER, is_health_check, route_label
from tandem.protocol.errors import ErrorCode
from tandem.protocol.logs import ACCESS_LOGGER, field_text, json_line, line_handler

_PATH_CHARACTERS = 200
"""Maximum characters of a path that matches no route."""
_DETAIL_CHARACTERS = 300
"""Maximum characters of an error message."""
_SCRAPE = "/metrics"


class AccessLine(Struct, omit_defaults=True):
    """Fields of one access log line, in the order in which they are written.

    Fields that are None or empty are omitted.
    """

    request_id: str
    key: str = ""
    """Name of the API key."""
    client: str = ""
    """Address of the client, as reported by a trusted proxy if there is one."""
    method: str = ""
    route: str = ""
    path: str = ""
    """Path of a request that matches no route."""
    status: int | None = None
    model: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    drafted_tokens: int | None = None
    """Drafts that were verified, if any were."""
    accepted_tokens: int | None = None
    ttft: float | None = None
    """Seconds until the first token."""
    duration: float | None = None
    finish_reason: str = ""
    """Finish reasons of its choices, separated by commas."""
    end: str = ""
    """"complete", "error", or "disconnect" if the client left before the end of the response."""
    error: str = ""
    """Error code."""
    reason: str = ""
    """Limit that the request exceeded, as in `tandem_refused_requests_total`, for status 429 and for 529 of Anthropic's
    routes."""
    detail: str = ""
    """Message of a refusal for a limit."""


class AccessLog:
    """Write access log lines.

    Health checks and successful scrapes are logged at debug level only. This bypasses `logging` where possible: it does
    not look up the caller, and formats the line once, which is faster.
    """

    def __init__(self, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._logger = logging.getLogger(ACCESS_LOGGER)

    @property
    def is_written(self) -> bool:
        """True if requests are logged at the current log level."""
        return self._is_enabled and self._logger.isEnabledFor(logging.INFO)

    def write(self, scope: Scope) -> None:
        """Log a request that has ended."""
        path: str = scope["path"]
        is_scraped = path == _SCRAPE and request_record(scope).status < 400
        level = logging.DEBUG if is_scraped or is_health_check(path) else logging.INFO
        if not self._is_enabled or not self._logger.isEnabledFor(level):
            return
        line = access_line(scope)
        handler = line_handler()
        if handler is None:
            self._logger.log(level, "%s", access_text(line))
            return
        stamp, name = handler.timestamps.at(time.time()), logging.getLevelName(level)
        if handler.log_format == "text":
            handler.write_line(f"{stamp} {handler.process} {name} {ACCESS_LOGGER}: {access_text(line)}")
        else:
            head = (
                f'{{"time":"{stamp}","level":"{name.lower()}","process":"{handler.process}","logger":"{ACCESS_LOGGER}",'
                f'"message":"{line.method} {line.route}",'
            )
            handler.write_line(head + json_line(line)[1:])


def client_text(scope: Scope) -> str:
    """Return the address of the client; "" for a Unix socket.

    The port is included if it is known.
    """
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}" if port else str(host)


def access_line(scope: Scope) -> AccessLine:
    """Build the log fields of a request from its scope and its record."""
    record, path = request_record(scope), scope["path"]
    route = route_label(path)
    line = AccessLine(
        record.request_id,
        key_name(scope),
        client_text(scope),
        scope["method"],
        route,
        path[:_PATH_CHARACTERS] if route == OTHER else "",
        record.status or None,
        duration=None if record.duration is None else round(record.duration, 6),
        end=record.end,
        error=record.error,
    )
    if record.status == 429 or (record.status == 529 and record.error == ErrorCode.OVERLOADED):
        line.reason = refusal_reason(record.status, record.error, record.refusal) or ""
        line.detail = scope.get(ERROR_KEY, "")[:_DETAIL_CHARACTERS]
    if record.num_choices:
        line.model = record.model
        line.prompt_tokens, line.cached_tokens = record.prompt_tokens, record.cached_tokens
        line.output_tokens = record.output_tokens
        if record.drafted_tokens:
            line.drafted_tokens, line.accepted_tokens = record.drafted_tokens, record.accepted_tokens
        if (ttft := record.time_to_first_token) is not None:
            line.ttft = round(ttft, 6)
        reasons = record.finish_reasons
        line.finish_reason = reasons[0] if len(reasons) == 1 else ",".join(dict.fromkeys(reasons))
    return line


def access_text(line: AccessLine) -> str:
    """Format the fields as text in which no value can be mistaken for another field."""
    parts = [
        f"{line.method} {line.route} {line.status or '-'} request_id={field_text(line.request_id)}",
        f" key={field_text(line.key)}" if line.key else "",
        f" client={field_text(line.client)}" if line.client else "",
        f" path={field_text(line.path)}" if line.path else "",
    ]
    if line.output_tokens is not None:
        parts += [
            f" model={field_text(line.model)} prompt_tokens={line.prompt_tokens} cached_tokens={line.cached_tokens}"
            f" output_tokens={line.output_tokens}",
            f" drafted_tokens={line.drafted_tokens} accepted_tokens={line.accepted_tokens}"
            if line.drafted_tokens
            else "",
            f" ttft={line.ttft:.4f}" if line.ttft is not None else "",
            f" finish_reason={line.finish_reason}" if line.finish_reason else "",
        ]
    error = f" error={field_text(line.error)}" if line.error else ""
    reason = f" reason={line.reason} detail={field_text(line.detail)}" if line.reason else ""
    return "".join(parts) + f" duration={line.duration or 0.0:.4f} end={line.end}{error}{reason}"
