"""Instruments of what a frontend holds at the moment."""

from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.instruments import Gauge, Histogram

_LAG_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoadMetrics:
    """Prometheus instruments of the load of one frontend.

    The gauges are read at each report.
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
