"""Lines of the log about what operators do, and about keys that are refused."""

import logging
from urllib.parse import parse_qsl

from starlette.types import Scope

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.admin.pause import NEW_REQUESTS
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.server.access_log import client_text
from tandem.protocol.commands import PAUSE_MODES
from tandem.protocol.logs import AUDIT_LOGGER, with_fields
from tandem.protocol.rate_limited_log import RateLimitedLog

_ADMIN = "/admin/"
_SESSIONS = "/v1/sessions/"
_WORDS = {"mode": PAUSE_MODES, "new_requests": NEW_REQUESTS}
"""Parameters of operators' calls, with the values that they may have."""
_TARGET_CHARACTERS = 200
_MAX_ADDRESSES = 256
"""Addresses with lines of their own among those whose keys are refused; all others share one."""


class AuditLog:
    """Writer of lines about operators and about refused keys.

    Each call of an administrator and each session ended by hand has a line. A refused key is never written; of one
    address without a valid key, and of one key without a right, there are two lines at most in an interval.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(AUDIT_LOGGER)
        self._refused = RateLimitedLog(self._logger, at_interval_end=True)

    def write(self, scope: Scope) -> None:
        """Write the line of a request that has ended, if it is worth one."""
        path, record = scope["path"], request_record(scope)
        if record.status in (401, 403):
            address = scope["client"][0] if scope.get("client") else ""
            # A key is named whatever else its address has tried; the names are those of the server's own keys.
            kind = f"key {key_name(scope)}" if record.status == 403 else address
            if record.status == 401 and self._refused.num_kinds >= _MAX_ADDRESSES:
                kind = "others"
            why = "no valid key" if record.status == 401 else "a key without the right"
            self._refused.warning(kind, f"refused: {why}", extra=self._fields(scope))
        elif path.startswith(_ADMIN) or (path.startswith(_SESSIONS) and scope["method"] == "DELETE"):
            self._logger.info("operator request", extra=self._fields(scope))

    @staticmethod
    def _fields(scope: Scope) -> dict[str, dict[str, object]]:
        record = request_record(scope)
        # Of the query only known words: anything else may be a key that was given in the wrong place, even its names.
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
