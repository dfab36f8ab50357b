"""OpenTelemetry traces of requests, exported over OTLP/HTTP.

This module imports the OpenTelemetry SDK, so it is imported only if traces are enabled.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.stage import Attempt, TracedSequence
from tandem.frontend.metrics.frontend_metrics import TraceMetrics
from tandem.frontend.server.paths import route_label
from tandem.protocol.events import SequenceTimes
from tandem.protocol.version import distribution_version

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]


class SpanData(Struct, frozen=True):
    """Span with its children, in seconds of the monotonic clock."""

    name: str
    start: float
    end: float
    attributes: Attributes = {}
    children: tuple["SpanData", ...] = ()
    error: str = ""
    """Error message; "" if there is none."""


def request_attributes(scope: Scope) -> dict[str, Value]:
    """Return the attributes of the span of a request.

    They are named by OpenTelemetry's conventions for HTTP and generative AI, and as in vLLM.
    """
    record = request_record(scope)
    found: dict[str, Value | None] = {
        "http.request.method": scope["method"],
        "http.route": route_label(scope["path"]),
        "http.response.status_code": record.status or None,
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.e2e": record.duration,
        "tandem.end": record.end,
        "tandem.key": key_name(scope) or None,
        "error.type": record.error or None,
    }
    if record.admitted is not None:
        found |= _generation_attributes(record, record.admitted)
    return {name: value for name, value in found.items() if value is not None}


def _generation_attributes(record: RequestRecord, admitted: Admitted) -> dict[str, Value | None]:
    sampling = admitted.sampling
    return {
        "gen_ai.response.model": record.model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": admitted.options.n,
        "gen_ai.usage.num_sequences": record.num_choices,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.latency.time_to_first_token": record.time_to_first_token,
        **_engine_latencies(record),
    }


def _engine_latencies(record: RequestRecord) -> dict[str, Value | None]:
    """Return the latencies of the first sequence of the successful attempt."""
    sequences = record.attempts[-1].sequences if record.attempts else []
    times = sequences[0].times if sequences else None
    if times is None or times.admitted is None:
        return {}
    queued, first, ended = times.admitted, times.first_token, times.ended
    return {
        "gen_ai.latency.time_in_queue": queued,
        "gen_ai.latency.time_in_model_prefill": None if first is None else first - queued,
        "gen_ai.latency.time_in_model_decode": None if first is None or ended is None else ended - first,
        "gen_ai.latency.time_in_model_inference": None if ended is None else ended - queued,
    }


def request_spans(record: RequestRecord) -> tuple[SpanData, ...]:
    """Return the child spans of a request.

    These are its stages, then a span for each sequence of each attempt.
    """
    stages = [SpanData(stage.name, stage.start, stage.end) for stage in record.stages]
    return (*stages, *_attempt_spans(record))


def _attempt_spans(record: RequestRecord) -> Iterator[SpanData]:
    for number, attempt in enumerate(record.attempts, 1):
        is_lost = number < len(record.attempts)
        for sequence in attempt.sequences:
            yield _sequence_span(number, attempt, sequence, "the engine was lost" if is_lost else "")


def _sequence_span(number: int, attempt: Attempt, sequence: TracedSequence, error: str) -> SpanData:
    """Return the span of a sequence in the engine.

    The engine's times are relative to when it received the sequence, which is taken to be when the frontend sent it.
    The time in between, about 0.1 ms on one host, counts as engine time.
    """
    end = attempt.submitted if attempt.ended is None else attempt.ended
    attributes: dict[str, Value] = {
        "tandem.attempt": number,
        "tandem.engine.epoch": str(attempt.engine_epoch),
        "tandem.choice": sequence.choice,
        "gen_ai.usage.cached_tokens": sequence.cached_tokens,
    }
    times = sequence.times
    if times is None:
        return SpanData("engine", attempt.submitted, end, attributes, error=error)
    if times.ended is not None:
        end = min(end, attempt.submitted + times.ended)
        attributes |= {"tandem.engine.num_steps": times.num_steps, "tandem.engine.preemptions": times.preemptions}
    phases = tuple(_phases(times, attempt.submitted, end))
    return SpanData("engine", attempt.submitted, end, attributes, phases, error)


def _phases(times: SequenceTimes, start: float, end: float) -> Iterator[SpanData]:
    """Yield the queue, prefill and decode spans of a sequence, as far as it got."""
    admitted = end if times.admitted is None else min(start + times.admitted, end)
    yield SpanData("queue", start, admitted)
    if times.admitted is None:
        return
    first = end if times.first_token is None else min(start + times.first_token, end)
    launched = {} if times.launched is None else {"tandem.engine.launch_delay": times.launched - times.admitted}
    yield SpanData("prefill", admitted, first, launched)
    if times.first_token is not None:
        yield SpanData("decode", first, end)


SPAN_NAME = "llm_request"
"""Name of a request's span, as in vLLM."""
TRACED_ROUTES = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
_SERVICE_NAME = "OTEL_SERVICE_NAME"
_QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE"
_DEFAULT_QUEUE = 2048
_CLOSE_SECONDS = 2.0
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class CountingExporter(SpanExporter):
    """Exporter that counts exported and failed spans.

    Called by the exporter's thread.
    """

    def __init__(self, exporter: SpanExporter, metrics: TraceMetrics) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self.num_taken = 0
        """Number of spans removed from the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            outcome = "exported" if result is SpanExportResult.SUCCESS else "failed"
            self._metrics.spans.labels(outcome).inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """Bounded queue of spans that counts those it drops.

    A background thread exports them, so a slow or unreachable collector delays no request.
    """

    def __init__(self, exporter: CountingExporter, size: int, metrics: TraceMetrics) -> None:
        super().__init__(exporter, max_queue_size=size, max_export_batch_size=min(size, 512))
        self._counted = exporter
        self._size = size
        self._metrics = metrics
        self._num_queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._num_queued - self._counted.num_taken >= self._size:
            self._metrics.spans.labels("dropped").inc()
            return
        self._num_queued += 1
        super().on_end(span)


class RequestTracer:
    """Create the spans of requests, once they have ended.

    Requests are sampled by their `traceparent` and by the sampler in OTEL_TRACES_SAMPLER.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem", distribution_version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span | None:
        """Start the span of a request; None if the request is not traced."""
        if scope["method"] != "POST" or route_label(scope["path"]) not in TRACED_ROUTES:
            return None
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT_HEADERS
        }
        record = request_record(scope)
        span = self._tracer.start_span(
            SPAN_NAME,
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.route": route_label(scope["path"])},
            start_time=_unix_time(record.arrived),
        )
        record.is_traced = span.is_recording()
        return span if isinstance(span, Span) and record.is_traced else None

    def end(self, span: Span, scope: Scope) -> None:
        """End the span of a request, and export the spans of its stages."""
        record = request_record(scope)
        span.set_attributes(request_attributes(scope))
        if record.end == "error" and (record.status >= 500 or record.status == 200):
            span.set_status(Status(StatusCode.ERROR, record.error))
        assert span.start_time is not None
        offset = span.start_time - int(
            record.arrived * 1e9
        )  # one offset for all spans, so that no child starts before its parent
        for child in request_spans(record):
            self._send(child, span, offset)
        assert record.ended_at is not None
        span.end(offset + int(record.ended_at * 1e9))

    def _send(self, data: SpanData, parent: Span, offset: int) -> None:
        span = self._tracer.start_span(
            data.name,
            set_span_in_context(parent),
            attributes=data.attributes,
            start_time=offset + int(data.start * 1e9),
        )
        if data.error:
            span.set_status(Status(StatusCode.ERROR, data.error))
        if isinstance(span, Span):
            for child in data.children:
                self._send(child, span, offset)
        span.end(offset + int(data.end * 1e9))

    def close(self) -> None:
        """Export queued spans, for at most two seconds.

        The SDK's shutdown waits much longer for an unresponsive collector.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def open_tracer(endpoint: str, metrics: TraceMetrics) -> RequestTracer:
    """Create a tracer that exports spans to a collector via OTLP/HTTP.

    The path of the URL is `/v1/traces` by default.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    exporter = CountingExporter(OTLPSpanExporter(url), metrics)
    given = {} if _SERVICE_NAME in os.environ else {"service.name": "tandem"}
    resource = Resource.create({**given, "service.version": distribution_version()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    size = int(os.environ.get(_QUEUE_SIZE, _DEFAULT_QUEUE))
    provider.add_span_processor(BoundedProcessor(exporter, size, metrics))
    return RequestTracer(provider)


def _unix_time(seconds: float) -> int:
    """Convert a time of the monotonic clock to Unix time in nanoseconds."""
    return time.time_ns() - time.monotonic_ns() + int(seconds * 1e9)
