"""Instruments of the usage of API keys."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.instruments import Counters


class KeyUsage:
    """Usage of one generating request, and how much of it is counted."""

    def __init__(self, name: str, prompt_tokens: int, num_tokens: Callable[[], int]) -> None:
        """Begin with nothing counted.

        `num_tokens` returns the number of tokens that the request has got so far.
        """
        self.name = name
        self.prompt_tokens = prompt_tokens
        self.num_tokens = num_tokens
        self.counted = 0


class KeyMetrics(Collector):
    """Prometheus instruments of the usage of API keys, by name.

    The names are those of the server's keys, so clients cannot add any. Tokens of open streams are counted whenever the
    metrics are collected, so that a frontend that is killed loses no more of a long stream than of anything else.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open: set[KeyUsage] = set()
        """Streams that have not ended."""
        registry.register(self)  # before the counters, which are collected after it
        self.requests = Counters("tandem_key_requests", "Generating requests of an API key.", ["key"], registry)
        self.prompt_tokens = Counters(
            "tandem_key_prompt_tokens",
            "Prompt tokens of an API key's requests that got a token.",
            ["key"],
            registry,
        )
        self.generation_tokens = Counters(
            "tandem_key_generation_tokens", "Tokens delivered to an API key.", ["key"], registry
        )

    def begin(self, usage: KeyUsage, is_streamed: bool) -> None:
        """Count a request that has been accepted.

        Tokens of one that is not streamed are delivered, and counted, at its end.
        """
        self.requests.labels(usage.name).inc()
        if is_streamed:
            self._open.add(usage)

    def end(self, usage: KeyUsage) -> None:
        """Count what is not counted yet of a request that has ended."""
        self._open.discard(usage)
        self._count(usage)

    def collect(self) -> Iterable[Metric]:
        """Count the tokens of open streams.

        It yields nothing, for the counters are collected themselves.
        """
        for usage in self._open:
            self._count(usage)
        return ()

    def _count(self, usage: KeyUsage) -> None:
        number = usage.num_tokens()
        if number <= usage.counted:
            return
        if usage.counted == 0:
            self.prompt_tokens.labels(usage.name).inc(usage.prompt_tokens)
        self.generation_tokens.labels(usage.name).inc(number - usage.counted)
        usage.counted = number
