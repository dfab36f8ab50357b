"""Spans of a request, from its record: what its trace shows, whatever sends it."""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from starlette.types import Scope

from tandem.frontend.access.api_key import key_name
from tandem.frontend.api.request_scope import request_record
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.stage import Attempt, TracedSequence
from tandem.frontend.server.paths import route_label
from tandem.protocol.events import SequenceTimes

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]


class SpanData(Struct, frozen=True):
    """One span with those within it, in seconds of the monotonic clock."""

    name: str
    start: float
    end: float
    attributes: Attributes = {}
    children: tuple["SpanData", ...] = ()
    error: str = ""
    """What went wrong; "" for nothing."""


def request_attributes(scope: Scope) -> dict[str, Value]:
    """Return the attributes of the span of a whole request.

    Their names are those of OpenTelemetry's conventions for HTTP and generative AI, and those of vLLM beside them.
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
    """Return the times of the first sequence in the engine that answered."""
    told = record.attempts[-1].sequences if record.attempts else []
    times = told[0].times if told else None
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
    """Return the spans within that of a request.

    They are its stages, then a span for each sequence of each attempt.
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

    The engine's times are those since it received the sequence, which the frontend takes for the time at which it sent
    it: the way there, some 0.1 ms on one host, counts as part of the engine's work.
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
    """Yield the queue, prefill and decode of a sequence, as far as it came."""
    admitted = end if times.admitted is None else min(start + times.admitted, end)
    yield SpanData("queue", start, admitted)
    if times.admitted is None:
        return
    first = end if times.first_token is None else min(start + times.first_token, end)
    launched = {} if times.launched is None else {"tandem.engine.launch_delay": times.launched - times.admitted}
    yield SpanData("prefill", admitted, first, launched)
    if times.first_token is not None:
        yield SpanData("decode", first, end)
