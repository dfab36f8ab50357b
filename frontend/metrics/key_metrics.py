"""Usage metrics of API keys."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.instruments import Counters


class KeyUsage:
    """Usage of a generating request, and the part that is already counted."""

    def __init__(self, name: str, prompt_tokens: int, num_tokens: Callable[[], int]) -> None:
        """Initialize with nothing counted.

        num_tokens: returns the number of tokens generated so far.
        """
        self.name = name
        self.prompt_tokens = prompt_tokens
        self.num_tokens = num_tokens
        self.counted = 0


class KeyMetrics(Collector):
    """Usage metrics by API key name.

    Clients cannot add names, which are those of the server's keys. Tokens of open streams are counted at each
    collection, so that a killed frontend loses little of a long stream.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open: set[KeyUsage] = set()
        """Open streams."""
        registry.register(self)  # collected before the counters, so that they are up to date
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
        """Count an accepted request.

        Tokens of a request without streaming are delivered, and counted, at its end.
        """
        self.requests.labels(usage.name).inc()
        if is_streamed:
            self._open.add(usage)

    def end(self, usage: KeyUsage) -> None:
        """Count the remaining tokens of a finished request."""
        self._open.discard(usage)
        self._count(usage)

    def collect(self) -> Iterable[Metric]:
        """Count the tokens of open streams.

        It yields nothing, since the counters are collected themselves.
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
