"""Paths of requests: their labels in the metrics, and those of health checks."""

_OPEN_PREFIX = "/health/"
"""Prefix of the health checks, which orchestrators and load balancers send without a key."""
_OPEN_PATHS = frozenset(("/health", "/ping"))
"""Paths of the health checks of other servers."""
_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/admin/scheduler", "/metrics"),
    *("/version", "/health", "/ping", "/health/live", "/health/ready", "/openapi.json", "/", "/docs"),
)
_NAMED = {
    "/v1/models/": "/v1/models/{model}",
    "/v1/sessions/": "/v1/sessions/{session_id}",
    "/v1/responses/": "/v1/responses/{response_id}",
}
"""Labels of routes whose paths end with a name, by their prefix."""


def route_label(path: str) -> str:
    """Return the metric label of a path.

    The labels are a bounded set that clients cannot extend.
    """
    if path in _ROUTES:
        return path
    return next((label for start, label in _NAMED.items() if path.startswith(start)), "other")


def is_health_check(path: str) -> bool:
    """Tell whether a path is that of a health check."""
    return path.startswith(_OPEN_PREFIX) or path in _OPEN_PATHS
