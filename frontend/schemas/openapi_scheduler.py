"""What `/openapi.json` says of `/admin/scheduler`."""

from tandem.frontend.api.openapi import STRING, Schema, closed
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.events import SEQUENCE_STATES

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}

POLICY = closed({"policy": {"enum": [*POLICIES]}})

_SEQUENCE = closed(
    {
        "client": STRING,
        "request_id": _COUNT,
        "state": {"enum": [*SEQUENCE_STATES]},
        "row": {"type": ["integer", "null"], "minimum": 0},
        **dict.fromkeys(("prompt_tokens", "generated_tokens", "computed_tokens"), _COUNT),
        **dict.fromkeys(("pages", "shared_pages", "cached_tokens"), _COUNT),
        "priority": {"type": "integer"},
        "preemptions": _COUNT,
        "age": _NUMBER,
        "wait": _NUMBER,
        "session_id": {"type": ["string", "null"]},
    }
)
_SESSION = closed({"session_id": STRING, "busy": _FLAG, "pages": _COUNT, "idle": _NUMBER})
INSPECTION = closed(
    {
        "policy": {"enum": [*POLICIES]},
        "queue": closed({"waiting": _COUNT, "oldest_wait": _NUMBER, "unlisted": _COUNT}),
        "rows": closed({"running": _COUNT, "total": _COUNT}),
        "pages": closed(
            {**dict.fromkeys(("used", "free", "settling", "total", "page_size"), _COUNT)},
        ),
        "prefix_cache": closed(
            {
                "pages": _COUNT,
                "queried_tokens": _COUNT,
                "hit_tokens": _COUNT,
                "hit_rate": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                "evicted_pages": _COUNT,
            }
        ),
        "preemptions": _COUNT,
        "sequences": {"type": "array", "items": _SEQUENCE},
        "sessions": {"type": "array", "items": _SESSION},
        "evicted_sessions": _COUNT,
    }
)
