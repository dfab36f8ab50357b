"""The reply to `GET /admin/scheduler`."""

from typing import Any

from tandem.protocol.events import EngineStats, InspectedSequence, InspectedSession, Inspection, Limits


def shown(found: Inspection, limits: Limits) -> dict[str, Any]:
    """An inspection as JSON. Times in seconds, sizes in tokens or pages as their names say."""
    stats = found.stats
    return {
        "policy": found.policy,
        "queue": {
            "waiting": stats.waiting,
            "oldest_wait": round(stats.oldest_wait, 3),
            "unlisted": found.omitted,
        },
        "rows": {"running": stats.running, "total": limits.max_rows},
        "pages": {
            "used": stats.pages_used,
            "free": found.pages_free,
            "settling": found.pages_settling,
            "total": stats.pages_total,
            "page_size": limits.page_size,
        },
        "prefix_cache": _prefix_cache(stats),
        "preemptions": stats.preemptions,
        "sequences": [_sequence(sequence) for sequence in found.sequences],
        "sessions": [_session(session) for session in found.sessions],
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
    }


def _session(session: InspectedSession) -> dict[str, Any]:
    return {
        "session_id": session.name,
        "busy": session.busy,
        "pages": session.pages,
        "idle": round(session.idle, 3),
    }
