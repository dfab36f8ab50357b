"""Routes of other servers that this server does not have."""

_NAMES = {
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
_REMEDIES = {
    "/v1/batches": "; `tandem run-batch` sends a file of requests",
    "/v1/conversations": "; `/v1/responses` continues a stored response by `previous_response_id`",
}
_WITHOUT_PREFIX = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


def missing_route(path: str) -> str | None:
    """Return what to say of a route of other servers.

    It is None for any other path.
    """
    for start, name in _NAMES.items():
        if path == start or path.startswith(start + "/"):
            return f"{name} not supported{_REMEDIES.get(start, '')}"
    if path.startswith("/v1/v1/"):
        return f"{path[:200]}: not found; /v1 is in it twice (the base URL of Anthropic's clients has none)"
    if path.startswith(_WITHOUT_PREFIX):
        return f"{path[:200]}: not found; the base URL of this API ends in /v1"
    return None
