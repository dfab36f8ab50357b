"""Routes of `/admin/scheduler`: the scheduler's state and its policy."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from tandem.frontend.api.admin.pause import PAUSE, pause_body
from tandem.frontend.api.openapi import error_response, json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.engine.calls import pause_of
from tandem.frontend.errors import unsupported
from tandem.frontend.request.field_types import String
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import STRING, Schema, closed, nullable
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.events import (
    SEQUENCE_STATES,
    InspectedSequence,
    InspectedSession,
    Inspection,
    Limits,
    Speculation,
)
from tandem.protocol.stats import EngineStats


def inspection_body(inspection: Inspection, limits: Limits) -> dict[str, Any]:
    """Convert an inspection to JSON.

    Times are in seconds; sizes are in tokens or pages, according to their names.
    """
    stats = inspection.stats
    return {
        "policy": inspection.policy,
        "pause": pause_body(pause_of(inspection)),
        "is_sleeping": bool(stats.sleeping),
        "queue": {
            "waiting": stats.waiting,
            "oldest_wait": round(stats.oldest_wait, 3),
            "unlisted": inspection.omitted,
        },
        "rows": {"running": stats.running, "total": limits.max_rows},
        "pages": {
            "used": stats.pages_used,
            "free": inspection.pages_free,
            "settling": inspection.pages_settling,
            "total": stats.pages_total,
            "page_size": limits.page_size,
        },
        "prefix_cache": _prefix_cache(stats),
        "speculation": None if inspection.speculation is None else _speculation(inspection.speculation, stats),
        "preemptions": stats.preemptions,
        "sequences": [_sequence(sequence) for sequence in inspection.sequences],
        "sessions": [_session(session) for session in inspection.sessions],
        "evicted_sessions": stats.sessions_evicted,
    }


def _prefix_cache(stats: EngineStats) -> dict[str, Any]:
    queried, hits = stats.prefix_queries, stats.prefix_hits
    return {
        "pages": stats.pages_cached,
        "queried_tokens": queried,
        "hit_tokens": hits,
        "hit_rate": round(hits / queried, 4) if queried else None,
        "evicted_pages": stats.pages_evicted,
        "checkpoints": stats.state_slots_used,
        "max_checkpoints": stats.state_slots,
        "evicted_checkpoints": stats.states_evicted,
    }


def _speculation(speculation: Speculation, stats: EngineStats) -> dict[str, Any]:
    drafted, accepted = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
    by_position = stats.spec_decode_num_accepted_tokens_per_pos
    return {
        "method": speculation.method,
        "max_drafts": speculation.max_drafts,
        "adaptive": speculation.is_adaptive,
        "drafts": stats.spec_decode_num_drafts,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "accepted_tokens_per_position": [by_position.get(str(index), 0) for index in range(speculation.max_drafts)],
    }


def _sequence(sequence: InspectedSequence) -> dict[str, Any]:
    return {
        "client": sequence.client,
        "request_id": sequence.request_id,
        "state": sequence.state,
        "row": sequence.row if sequence.row >= 0 else None,
        "prompt_tokens": sequence.prompt_len,
        "generated_tokens": sequence.generated,
        "computed_tokens": sequence.launched,
        "pages": sequence.pages,
        "shared_pages": sequence.shared_pages,
        "cached_tokens": sequence.cached_tokens,
        "priority": sequence.priority,
        "preemptions": sequence.preemptions,
        "age": round(sequence.age, 3),
        "wait": round(sequence.wait, 3),
        "session_id": sequence.session or None,
        "http_request_id": sequence.http_request_id or None,
        "key": sequence.key or None,
        "drafted_tokens": sequence.drafted,
        "accepted_tokens": sequence.accepted,
        "adapter": sequence.adapter or None,
    }


def _session(session: InspectedSession) -> dict[str, Any]:
    return {
        "session_id": session.name,
        "busy": session.busy,
        "pages": session.pages,
        "idle": round(session.idle, 3),
        "key": session.key or None,
    }


_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "minimum": 0}
_RATE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
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
        "http_request_id": {"type": ["string", "null"]},
        "key": {"type": ["string", "null"]},
        "drafted_tokens": _COUNT,
        "accepted_tokens": _COUNT,
        "adapter": {"type": ["string", "null"]},
    }
)
_SPECULATION = closed(
    {
        "method": STRING,
        "max_drafts": {"type": "integer", "minimum": 1},
        "adaptive": _FLAG,
        **dict.fromkeys(("drafts", "drafted_tokens", "accepted_tokens"), _COUNT),
        "acceptance_rate": _RATE,
        "accepted_tokens_per_position": {"type": "array", "items": _COUNT},
    }
)
_SESSION = closed(
    {"session_id": STRING, "busy": _FLAG, "pages": _COUNT, "idle": _NUMBER, "key": {"type": ["string", "null"]}}
)
INSPECTION = closed(
    {
        "policy": {"enum": [*POLICIES]},
        "pause": PAUSE,
        "is_sleeping": _FLAG,
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
                "hit_rate": _RATE,
                "evicted_pages": _COUNT,
                "checkpoints": _COUNT,
                "max_checkpoints": _COUNT,
                "evicted_checkpoints": _COUNT,
            }
        ),
        "speculation": nullable(_SPECULATION),
        "preemptions": _COUNT,
        "sequences": {"type": "array", "items": _SEQUENCE},
        "sessions": {"type": "array", "items": _SESSION},
        "evicted_sessions": _COUNT,
    }
)


_BODY = BodyFormat((Field("policy", String(), required=True),))


def parse_policy(body: bytes, ignored: IgnoredFields) -> str:
    """Parse the name of a policy, which the engine validates.

    Raises ApiError 400 for a malformed body, and for an unknown field.

    """
    policy: str = _BODY.read(body, ignored)["policy"]
    return policy


def scheduler_router(service: Service) -> APIRouter:
    """Build the routes of `/admin/scheduler`."""
    router = APIRouter()

    @router.get(
        "/admin/scheduler",
        openapi_extra={
            "responses": {
                "200": json_response("The state at one moment.", INSPECTION),
                "503": error_response("Not ready; try again later."),
            }
        },
    )
    async def get_scheduler() -> dict[str, Any]:
        """Describe the queue, rows, pages, prefix cache and sessions of the engine."""
        return inspection_body(await service.client.calls.inspect(), service.ready().limits)

    @router.post(
        "/admin/scheduler", openapi_extra=takes(POLICY, json_response("The policy is in effect.", POLICY), False)
    )
    async def set_scheduler(request: Request) -> dict[str, Any]:
        """Change the scheduling policy from the next step on.

        The new policy applies to running and waiting sequences.
        """
        parse = partial(parse_policy, ignored=service.ignored_fields(request))
        async with service.pending.receive(request, parse) as policy:
            if refusal := await service.client.calls.set_policy(policy):
                raise unsupported(refusal, "policy")
        return {"policy": policy}

    return router
