"""ASGI middleware that counts, logs and traces responses and gives each a request id."""

import logging
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.frontend.api.live_stream import WRITER_KEY, AnswerWriter
from tandem.frontend.api.request_scope import (
    ERROR_KEY,
    REQUEST_ID_KEY,
    choose_request_id,
    request_id_headers,
    request_record,
)
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.request_metrics import refusal_reason
from tandem.frontend.request.extra_fields import ignored_label
from tandem.frontend.request.ignored_fields import IGNORED_HEADER, IGNORED_KEY, IgnoredFields
from tandem.frontend.server.access_log import AccessLog
from tandem.frontend.server.audit_log import AuditLog
from tandem.frontend.server.paths import is_health_check, route_label
from tandem.protocol.logs import without_message
from tandem.protocol.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from tandem.frontend.server.tracing import RequestTracer

logger = logging.getLogger(__name__)

_MESSAGE_CHARACTERS = 300
"""Maximum characters of an error message in the log; parts of it may come from the client."""


class Access:
    """Middleware that labels, counts and logs responses.

    It adds a request id to each response, counts it and logs failures; bodies pass through unchanged.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: FrontendMetrics,
        access: AccessLog,
        audit: AuditLog,
        with_details: bool,
        tracer: "RequestTracer | None" = None,
    ) -> None:
        """Initialize the middleware.

        with_details: log at debug level why requests are refused. tracer: exports traces, None to disable them.
        """
        self._app = app
        self._metrics = metrics
        self._log = RateLimitedLog(logger, at_interval_end=True)
        self._access = access
        self._audit = audit
        self._with_details = with_details
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_slash(scope)
        own_id = choose_request_id(scope)
        scope[REQUEST_ID_KEY] = own_id.decode()
        record = request_record(scope)
        span = None if self._tracer is None else self._tracer.begin(scope)
        id_headers = [(name, own_id) for name in request_id_headers(scope)]

        async def send_with_request_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._answered(scope, message["status"], own_id)
                message["headers"] = [*message["headers"], *id_headers, *self._ignored(scope)]
            elif not message.get("more_body"):
                record.is_answered = not _has_left(scope)
            await send(message)

        try:
            await self._app(scope, receive, send_with_request_id)
        except Exception as error:
            # The framework has sent a 500 if the response had not started.
            record.error = record.error or "internal_error"
            fields = (_request_line(scope), own_id.decode(), type(error).__name__)
            logger.error("%s failed, request id %s: %s", *fields, extra=without_message(error))
        finally:
            record.ended_at = time.monotonic()
            self._count_end(scope, record)
            self._audit.write(scope)
            self._access.write(scope)
            if span is not None and self._tracer is not None:
                self._tracer.end(span, scope)

    def _count_end(self, scope: Scope, record: RequestRecord) -> None:
        stages = [(stage.name, stage.end - stage.start) for stage in record.stages]
        reason = refusal_reason(record.status, record.error, record.refusal) if record.error else None
        self._metrics.ends.end(route_label(scope["path"]), record.duration or 0.0, stages, reason)

    def _ignored(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Count the ignored fields and return the header that names them."""
        ignored: IgnoredFields | None = scope.get(IGNORED_KEY)
        if ignored is None or not ignored.paths:
            return []
        for label in {ignored_label(path) for path in ignored.paths}:
            self._metrics.ignored_fields.labels(label).inc()
        return [(IGNORED_HEADER.encode(), ignored.header())]

    def _answered(self, scope: Scope, status: int, own_id: bytes) -> None:
        self._metrics.requests.labels(route_label(scope["path"]), str(status)).inc()
        if status >= 400 and not (status == 429 and self._access.is_written):  # the access log has the reason
            # A health check reports its 503 in the response; it is not logged as a failure.
            is_error = status >= 500 and not is_health_check(scope["path"])
            line = f"{status} for {_request_line(scope)}, request id {own_id.decode()}"
            # The message may quote the request.
            is_own = status == 429 or status >= 500 or self._with_details
            if is_own and (message := scope.get(ERROR_KEY)):
                line = f"{line}: {message[:_MESSAGE_CHARACTERS]!r}"
            if status == 429 or (is_error and status in (503, 504, 529)):
                self._log.warning(str(status), "%s", line)  # frequent under overload
            else:
                logger.log(logging.WARNING if is_error else logging.DEBUG, "%s", line)


def _without_slash(scope: Scope) -> Scope:
    """Return the scope with the trailing slash removed from the path.

    Clients that join a base URL and a path may add one, and a redirect would lose the body of a POST. A session name
    may end in a slash.
    """
    path: str = scope["path"]
    if not path.endswith("/") or path == "/" or path.startswith("/v1/sessions/"):
        return scope
    return {**scope, "path": path.rstrip("/") or "/"}


def _has_left(scope: Scope) -> bool:
    writer: AnswerWriter | None = scope.get(WRITER_KEY)
    return writer is not None and writer.has_left


def _request_line(scope: Scope) -> str:
    return f"{scope['method']} {scope['path'][:200]!r}"
