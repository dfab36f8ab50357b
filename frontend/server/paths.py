"""Classify request paths.

A path determines the metric label, the required right, and whether it is a health check or an unsupported route of
OpenAI or vLLM.
"""

from collections.abc import Mapping

from tandem.frontend.access.api_key import Right

_OPEN_PREFIX = "/health/"
"""Prefix of the health checks, which orchestrators and load balancers send without a key."""
_OPEN_PATHS = frozenset(("/health", "/ping"))
"""Health check paths of other servers."""
OTHER = "other"
"""Label of all paths that match no route."""
TRAINER_ROUTES = frozenset(
    (
        *("/pause", "/resume", "/is_paused", "/server_info", "/get_world_size", "/reset_prefix_cache"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/sleep", "/wake_up", "/is_sleeping"),
    )
)
"""Operator routes under vLLM's names."""
_ROUTES = frozenset(
    (
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/admin/scheduler", "/admin/pause"),
        "/admin/swap",
        *("/admin/resume", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/version", "/health", "/ping", "/health/live", "/health/ready", "/openapi.json", "/", "/docs"),
        *TRAINER_ROUTES,
    )
)
_PARAMETER_ROUTES = {
    "/v1/models/": "/v1/models/{model}",
    "/v1/sessions/": "/v1/sessions/{session_id}",
    "/v1/responses/": "/v1/responses/{response_id}",
}
"""Labels of routes with a path parameter, by prefix."""
ROUTE_RIGHTS: Mapping[str, Right | None] = {
    "/v1/completions": Right.GENERATE,
    "/v1/chat/completions": Right.GENERATE,
    "/v1/responses": Right.GENERATE,
    "/v1/responses/input_tokens": Right.GENERATE,
    "/v1/responses/{response_id}": Right.GENERATE,
    "/v1/messages": Right.GENERATE,
    "/v1/messages/count_tokens": Right.GENERATE,
    "/v1/sessions/{session_id}": Right.GENERATE,
    "/tokenize": Right.GENERATE,
    "/detokenize": Right.GENERATE,
    "/metrics": Right.METRICS,
    "/admin/scheduler": Right.ADMIN,
    "/admin/pause": Right.ADMIN,
    "/admin/resume": Right.ADMIN,
    "/admin/swap": Right.ADMIN,
    "/v1/load_lora_adapter": Right.ADMIN,
    "/v1/unload_lora_adapter": Right.ADMIN,
    **dict.fromkeys(TRAINER_ROUTES, Right.ADMIN),
    "/v1/models": None,
    "/v1/models/{model}": None,
    "/version": None,
    "/openapi.json": None,
}
"""Required right by route label. None: any valid key, as for a path without a label, so every route is listed."""
_PREFIX_RIGHTS = {"/admin/": Right.ADMIN}
"""Required right by prefix, for paths without a label."""
_UNSUPPORTED_ROUTES = {
    "/v1/embeddings": "embeddings are",
    "/embeddings": "embeddings are",
    "/v1/moderations": "moderation is",
    "/v1/images": "generating images is",
    "/v1/audio": "audio is",
    "/v1/videos": "generating videos is",
    "/v1/realtime": "the Realtime API is",
    "/v1/files": "files are",
    "/v1/uploads": "uploads are",
    "/v1/batches": "the Batch API is",
    "/v1/vector_stores": "vector stores are",
    "/v1/conversations": "stored conversations are",
    "/v1/assistants": "the Assistants API is",
    "/v1/threads": "the Assistants API is",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/evals": "evals are",
    "/v1/rerank": "reranking is",
    "/v1/score": "scoring of pairs is",
    "/pooling": "pooling is",
    "/classify": "classification is",
}
"""Features of routes of OpenAI and vLLM that are not supported, by prefix."""
_OPTIONAL_ROUTES = dict.fromkeys(
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--enable-lora and --lora-root DIR"
)
"""Routes that exist only on a server with these flags."""
_REMEDIES = {
    "/v1/batches": "; `tandem run-batch` sends a file of requests",
    "/v1/conversations": "; `/v1/responses` continues a stored response by `previous_response_id`",
}
_WITHOUT_PREFIX = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


def route_label(path: str) -> str:
    """Return the metric label of a path, which is one of a fixed set."""
    if path in _ROUTES:
        return path
    return next((label for start, label in _PARAMETER_ROUTES.items() if path.startswith(start)), OTHER)


def required_right(path: str) -> Right | None:
    """Return the right that a path requires; None for any valid key.

    Unknown paths are open to any key and get a 404.
    """
    label = route_label(path)
    if label in ROUTE_RIGHTS:
        return ROUTE_RIGHTS[label]
    return next((right for start, right in _PREFIX_RIGHTS.items() if path.startswith(start)), None)


def is_health_check(path: str) -> bool:
    """Return True for the path of a health check."""
    return path.startswith(_OPEN_PREFIX) or path in _OPEN_PATHS


def needed_flags(path: str) -> str:
    """Return the flags that a route needs to exist; empty if it needs none."""
    return _OPTIONAL_ROUTES.get(path, "")


def missing_route(path: str) -> str | None:
    """Return the error message for an unsupported route of OpenAI or vLLM, or a wrong base URL, else None."""
    for start, name in _UNSUPPORTED_ROUTES.items():
        if path == start or path.startswith(start + "/"):
            return f"{name} not supported{_REMEDIES.get(start, '')}"
    if path.startswith("/v1/v1/"):
        return f"{path[:200]}: not found; /v1 is in it twice (the base URL of Anthropic's clients has none)"
    if path.startswith(_WITHOUT_PREFIX):
        return f"{path[:200]}: not found; the base URL of this API ends in /v1"
    return None
