"""Audit log of operator requests and refused API keys."""

import logging
from urllib.parse import parse_qsl

from starlette.types import Scope

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.admin.pause import NEW_REQUESTS
from tandem.frontend.api.admin.sleep import LEVELS
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.server.access_log import client_text
from tandem.frontend.server.paths import TRAINER_ROUTES
from tandem.protocol.commands import PAUSE_MODES, SLEEP_TAGS
from tandem.protocol.logs import AUDIT_LOGGER, with_fields
from tandem.protocol.rate_limited_log import RateLimitedLog

_ADMIN = "/admin/"
_SESSIONS = "/v1/sessions/"
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_WORDS = {"mode": PAUSE_MODES, "new_requests": NEW_REQUESTS, "level": LEVELS, "tags": SLEEP_TAGS}
"""Allowed values of the query parameters of operator requests."""
_TARGET_CHARACTERS = 200
_MAX_ADDRESSES = 256
"""Maximum number of client addresses with invalid keys that are logged separately; all others share a line."""


class AuditLog:
    """Write audit log lines.

    Each admin request and each deletion of a session has a line. A refused key is never logged. For a client address
    without a valid key, or a key without a right, there are at most two lines per interval.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(AUDIT_LOGGER)
        self._refused = RateLimitedLog(self._logger, at_interval_end=True)

    def write(self, scope: Scope) -> None:
        """Log a request that has ended, if it is relevant."""
        path, record = scope["path"], request_record(scope)
        if record.status in (401, 403):
            address = scope["client"][0] if scope.get("client") else ""
            # A 403 is counted by key: the names are those of the server's own keys, so they are bounded.
            kind = f"key {key_name(scope)}" if record.status == 403 else address
            if record.status == 401 and self._refused.num_kinds >= _MAX_ADDRESSES:
                kind = "others"
            reason = "no valid key" if record.status == 401 else "a key without the right"
            self._refused.warning(kind, f"refused: {reason}", extra=self._fields(scope))
        elif (
            path.startswith(_ADMIN)
            or path in _ADAPTERS
            or path in TRAINER_ROUTES
            or (path.startswith(_SESSIONS) and scope["method"] == "DELETE")
        ):
            self._logger.info("operator request", extra=self._fields(scope))

    @staticmethod
    def _fields(scope: Scope) -> dict[str, dict[str, object]]:
        record = request_record(scope)
        # Only known query values: anything else, even a name, may be a key given in the wrong field.
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        words = "&".join([f"{name}={value}" for name, value in query if value in _WORDS.get(name, ())])
        target = scope["path"] + (f"?{words}" if words else "")
        return with_fields(
            method=scope["method"],
            path=target[:_TARGET_CHARACTERS],
            key=key_name(scope) or None,
            client=client_text(scope) or None,
            request_id=record.request_id,
            status=record.status or None,
        )
