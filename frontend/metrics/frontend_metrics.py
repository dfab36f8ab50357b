"""Prometheus metrics of an HTTP process.

The metrics of the engine are served by its supervisor.
"""

from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.instruments import Counter, Counters, Gauge, Histogram, InstrumentRegistry
from tandem.frontend.metrics.key_metrics import KeyMetrics
from tandem.frontend.metrics.request_metrics import FIRST_TOKEN_SECONDS, TOKEN_SECONDS, RequestMetrics
from tandem.protocol.errors import ErrorCode

_CHECK_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_LAG_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

STORE_OPERATIONS = ("get", "save", "delete")
"""Operations of the response store with counted failures."""
BREAKING_CODES = tuple(code.value for code in (ErrorCode.ENGINE_UNAVAILABLE, ErrorCode.ENGINE_FAILED))
"""Error codes that are expected to end streams; others are added when they occur."""


class ConnectionMetrics:
    """Prometheus instruments of the connections of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("tandem_frontend_num_connections", "Open connections of clients.", registry)
        self.closed = Counters(
            "tandem_frontend_connections_closed",
            "Connections that the server closed, or refused a request of, for a limit of the transport.",
            ["reason"],
            registry,
        )


class LinkMetrics:
    """Prometheus instruments of a frontend's link to the engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connected = Gauge(
            "tandem_frontend_engine_connected",
            "1 while a link to the engine is open and its handshake done.",
            registry,
        )
        self.connects = Counter("tandem_frontend_engine_connects", "Completed handshakes with an engine.", registry)
        self.losses = Counter("tandem_frontend_engine_losses", "Links to an engine that were lost.", registry)
        self.resubmitted = Counter(
            "tandem_frontend_resubmitted_requests",
            "Times that a request was submitted again after the loss of its engine.",
            registry,
        )


class GrammarMetrics:
    """Prometheus instruments of grammars."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "tandem_grammar_check_seconds",
            "Time in which a grammar was checked, with the time that it waits; one that is known takes next to none.",
            registry,
            _CHECK_SECONDS,
        )


class TemplateMetrics:
    """Prometheus instruments of chat templates."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "tandem_template_render_seconds",
            "Time from a conversation to its prompt, with the time that it waits for those before it.",
            registry,
            _CHECK_SECONDS,
        )
        self.restarts = Counters(
            "tandem_template_process_restarts",
            "Ends of the process that renders chat templates: killed because a conversation took too long, or ended.",
            ["reason"],
            registry,
        )


class LoadMetrics:
    """Prometheus instruments of the load of one frontend.

    Gauges are read at each report.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.arriving = Gauge(
            "tandem_frontend_num_requests_arriving",
            "Requests that are read, parsed, rendered or tokenized.",
            registry,
        )
        self.responses = Gauge("tandem_frontend_num_responses", "Generations being answered.", registry)
        self.held = Gauge(
            "tandem_frontend_num_requests_held", "Requests that wait for an engine to come back.", registry
        )
        self.queued_tokens = Gauge(
            "tandem_frontend_queued_prompt_tokens",
            "Prompt tokens that were submitted and have no output yet.",
            registry,
        )
        self.body_bytes = Gauge("tandem_frontend_body_bytes", "Bytes of large request bodies that are held.", registry)
        self.stored_bytes = Gauge(
            "tandem_frontend_stored_bytes",
            "Bytes that are held of large answers from the store, and of inputs that wait to be stored.",
            registry,
        )
        self.loop_lag = Histogram(
            "tandem_event_loop_lag_seconds",
            "Delay with which the event loop ran a timer, sampled 20 times a second.",
            registry,
            _LAG_SECONDS,
        )


class TraceMetrics:
    """Instruments of the spans that a frontend sends to a collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans = Counters(
            "tandem_frontend_trace_spans",
            "Spans of traced requests, by outcome: exported, failed (the collector did not take them), or dropped "
            "because too many waited.",
            ["outcome"],
            registry,
        )
        # The exporter's thread counts, and must not add series during a report.
        for outcome in ("exported", "failed", "dropped"):
            self.spans.labels(outcome)


class FrontendMetrics:
    """Prometheus instruments of one app.

    Each app has its own registry, so that several apps fit into one process.
    """

    def __init__(self, registry: InstrumentRegistry) -> None:
        self.registry = registry
        self.connections = ConnectionMetrics(registry)
        self.keys = KeyMetrics(registry)
        self.load = LoadMetrics(registry)
        self.ends = RequestMetrics(registry)
        self.requests = Counters("tandem_http_requests", "HTTP requests answered.", ["route", "status"], registry)
        self.ignored_fields = Counters(
            "tandem_ignored_fields",
            "Requests with a field that has no effect; fields that no table knows are counted as other.",
            ["field"],
            registry,
        )
        self.running = Gauge("tandem_frontend_num_requests_running", "Sequences open in this frontend.", registry)
        self.generation_tokens = Counter(
            "tandem_frontend_generation_tokens", "Tokens delivered by this frontend.", registry
        )
        self.aborts = Counters(
            "tandem_frontend_aborts", "Sequences aborted before the engine ended them.", ["reason"], registry
        )
        self.first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "Time from the arrival of an HTTP request to the first token of a choice.",
            registry,
            FIRST_TOKEN_SECONDS,
        )
        self.inter_token = Histogram(
            "tandem_inter_token_latency_seconds",
            "Time between two deliveries of tokens of one sequence, however many tokens they have.",
            registry,
            TOKEN_SECONDS,
        )
        self.store_failures = Counters(
            "tandem_store_failures",
            "Calls of the store of responses that failed.",
            ["operation"],
            registry,
        )
        # Start at 0, so that `rate()` sees the first failure.
        for operation in STORE_OPERATIONS:
            self.store_failures.labels(operation)
        self.link = LinkMetrics(registry)
        self.traces = TraceMetrics(registry)
        self.templates = TemplateMetrics(registry)
        self.grammars = GrammarMetrics(registry)
        self.broken_streams = Counters(
            "tandem_frontend_broken_streams",
            "Streams that ended with an error after their status 200.",
            ["code"],
            registry,
        )
        for code in BREAKING_CODES:
            self.broken_streams.labels(code)
