"""Prometheus instruments of the traces of one frontend."""

from prometheus_client import CollectorRegistry, Counter


class TraceMetrics:
    """Instruments of the spans that a frontend sends to a collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans = Counter(
            "tandem_frontend_trace_spans",
            "Spans of traced requests, by outcome: exported, failed (the collector did not take them), or dropped "
            "because too many waited.",
            ["outcome"],
            registry=registry,
        )
