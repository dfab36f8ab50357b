"""Instruments of the usage of API keys."""

from prometheus_client import CollectorRegistry, Counter


class KeyMetrics:
    """Prometheus instruments of the usage of API keys, by name.

    The names are those of the server's keys, so clients cannot add any.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("tandem_key_requests", "Generating requests of an API key.", ["key"], registry=registry)
        self.prompt_tokens = Counter(
            "tandem_key_prompt_tokens",
            "Prompt tokens of an API key's requests that got a token.",
            ["key"],
            registry=registry,
        )
        self.generation_tokens = Counter(
            "tandem_key_generation_tokens", "Tokens delivered to an API key.", ["key"], registry=registry
        )

    def count(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count a request that has ended."""
        self.requests.labels(name).inc()
        if generation_tokens:
            self.prompt_tokens.labels(name).inc(prompt_tokens)
            self.generation_tokens.labels(name).inc(generation_tokens)
