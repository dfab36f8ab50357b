"""Metrics of HTTP requests, and of generating requests in particular."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.instruments import Counter, Counters, Histogram, Histograms
from tandem.protocol.errors import ErrorCode

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bucket bounds of the time to first token in seconds: vLLM's and some in between."""
TOKEN_SECONDS = (
    *(
        0.0001,
        0.0002,
        0.0003,
        0.0004,
        0.0005,
        0.0006,
        0.0008,
        0.001,
        0.0012,
        0.0015,
        0.002,
        0.0025,
        0.003,
        0.004,
        0.005,
    ),
    *(0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bucket bounds of the inter-token latency in seconds: vLLM's and finer ones below 10 ms."""
REQUEST_SECONDS = (
    *(
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.2,
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
    ),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Bucket bounds of the request duration in seconds: vLLM's and some smaller ones."""
_ROUTE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0)
_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
_STAGES = ("parse", "render", "tokenize", "grammar")
_REASONS = (
    *("concurrency", "queued_tokens", "bodies", "body_size", "grammar", "key", "right", "key_limit", "host"),
    *("engine_overloaded", "unavailable"),
)
_REASON_OF_STATUS = {401: "key", 403: "right", 413: "body_size", 421: "host", 503: "unavailable", 529: "unavailable"}


def refusal_reason(status: int, code: str, limit: str) -> str | None:
    """Return the label of a refused request.

    Return None unless the request was refused for a lack of capacity or rights. code: error code. limit: the limit of
    this frontend that was exceeded, if any. 529 is Anthropic's status for an overload and for an engine that is not
    ready.
    """
    if limit:
        return limit
    if status == 429 or (status == 529 and code == ErrorCode.OVERLOADED):
        return "key_limit" if code == ErrorCode.RATE_LIMITED else "engine_overloaded"
    return _REASON_OF_STATUS.get(status)


class RequestMetrics:
    """Metrics of the outcomes of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.duration = Histograms(
            "tandem_http_request_duration_seconds",
            "Time from an HTTP request's headers to the end of its response.",
            ["route"],
            registry,
            _ROUTE_SECONDS,
        )
        self.refused = Counters(
            "tandem_refused_requests",
            "Requests refused for want of room or rights; `engine_overloaded` are those that the engine refused, "
            "`unavailable` those without a ready engine.",
            ["reason"],
            registry,
        )
        self.stages = Histograms(
            "tandem_request_stage_seconds",
            "Time that a request's body was parsed, its chat rendered, its prompts tokenized or its grammar checked, "
            "waits included.",
            ["stage"],
            registry,
            _STAGE_SECONDS,
        )
        for reason in _REASONS:
            self.refused.labels(reason)
        for stage in _STAGES:
            self.stages.labels(stage)
        self.latency = Histogram(
            "tandem_e2e_request_latency_seconds",
            "Time from the arrival of an HTTP request to its last byte.",
            registry,
            REQUEST_SECONDS,
        )
        self.time_per_token = Histogram(
            "tandem_request_time_per_output_token_seconds",
            "Mean time of a token after the first of a request that was answered in full, by its longest choice.",
            registry,
            TOKEN_SECONDS,
        )
        self.params_n = Histogram(
            "tandem_request_params_n", "`n` of a request that was answered in full.", registry, (1, 2, 5, 10, 20)
        )
        self.longest = Histogram(
            "tandem_request_max_num_generation_tokens",
            "Tokens of the longest choice of a request that was answered in full.",
            registry,
            _TOKENS,
        )
        self.prompt_tokens = Counter(
            "tandem_frontend_prompt_tokens", "Prompt tokens of completed HTTP requests.", registry
        )

    def end(self, route: str, duration: float, stages: Iterable[tuple[str, float]], reason: str | None) -> None:
        """Count an HTTP request at its end.

        stages: seconds of each stage. reason: reason of a refusal. Times are in seconds.
        """
        self.duration.labels(route).observe(duration)
        for name, seconds in stages:
            self.stages.labels(name).observe(seconds)
        if reason is not None:
            self.refused.labels(reason).inc()

    def answered(self, latency: float, decoding: float, prompt_tokens: int, n: int, longest: int) -> None:
        """Count a completed generation.

        latency: seconds from its arrival; decoding: seconds from its first token to its last; longest: tokens of its
        longest choice.

        """
        self.latency.observe(latency)
        self.prompt_tokens.inc(prompt_tokens)
        self.params_n.observe(n)
        self.longest.observe(longest)
        if longest > 1:
            self.time_per_token.observe(decoding / (longest - 1))
