"""Prometheus instruments of the traces of one frontend."""

from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.instruments import Counters


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
        # Another thread counts, which is to add no series while they are reported.
        for outcome in ("exported", "failed", "dropped"):
            self.spans.labels(outcome)
