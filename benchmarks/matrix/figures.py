"""Figures of a run: trials, medians over trials, and their collection."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from tandem.frontend.cli.bench.distribution import distribution
from tandem.frontend.cli.bench.record import Record

PERCENTS = ("p50", "p95", "p99")
Percentiles = dict[str, float]


class Figures(Struct):
    """Figures of all requests of one trial, or medians over trials.

    Times are in milliseconds.
    """

    completed: float
    errors: float
    output_tokens_per_s: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    request_tokens_per_s: Percentiles
    """Output tokens of a request over the time from its start to its end."""
    queue_wait: Percentiles
    """Queueing time in the engine: mean, and percentiles from histogram buckets."""
    starved: float
    """Number of requests with an ITL above a bound."""
    longest_gap: float
    ttft_by_priority: dict[int, Percentiles] = field(default_factory=dict)
    """TTFT by priority class, if there is more than one."""


class Cell(Struct):
    """Figures of a server under a load."""

    configuration: str
    scenario: str
    median: Figures
    trials: list[Figures]


class Held(Struct):
    """Number of concurrent sequences while others waited.

    The figures are medians over trials.
    """

    configuration: str
    kv_tokens: int
    rows: int
    """Row limit, the number of streams, so that sequences wait only for memory."""
    running: float
    """Mean number of sequences with a row, over time."""
    step_rows: float
    """Mean number of computed rows per step, without rows that lacked a page."""
    peak: float
    preemptions: float
    seconds: float
    """Seconds in which sequences waited."""
    output_tokens_per_s: float


class PrefillTrial(Struct):
    """Gaps between tokens of running streams, in milliseconds."""

    alone: dict[str, float]
    loaded: dict[str, float]
    """Gaps while a long prompt was in prefill."""
    prompts: int
    prompt_ttft: dict[str, float]

    def over(self, percent: str) -> float | None:
        """Return the p99 of `loaded` as a multiple of a percentile of `alone`.

        Returns None without a gap.
        """
        p99, base = self.loaded.get("p99"), self.alone.get(percent)
        return p99 / base if p99 is not None and base else None


class PrefillGaps(Struct):
    """Gaps between tokens of running streams in milliseconds, medians over trials."""

    alone: dict[str, float]
    loaded: dict[str, float]
    gaps: int
    """Number of gaps in `loaded`, over all trials."""
    prompts: int
    """Number of long prompts in all trials."""
    prompt_ttft: dict[str, float]
    over: dict[str, list[float]]
    """`PrefillTrial.over` of each trial, by percentile."""


class ServerFacts(Struct):
    """Flags and settings of one server."""

    says: str
    flags: str
    """Flags of this server, without the shared ones."""
    ready_seconds: float
    all_flags: dict[str, Any] = field(default_factory=dict)
    """All flags with their defaults; None if left to the engine or without effect."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings logged by its engine."""


class Measured(Struct):
    """All results of a run."""

    hardware: dict[str, str]
    common_flags: str
    """Flags shared by all servers."""
    scenarios: dict[str, str]
    """Description of each load."""
    servers: dict[str, ServerFacts] = field(default_factory=dict)
    matrix: list[Cell] = field(default_factory=list)
    policies: list[Cell] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    prefill_gaps: dict[str, PrefillGaps] = field(default_factory=dict, name="beside")


def _pick(values: Iterable[float | None], scale: float = 1.0) -> Percentiles:
    summary = distribution((value for value in values if value is not None), scale)
    return {name: summary[name] for name in PERCENTS if name in summary}


def figures(records: Sequence[Record], queue_wait: Percentiles, starved_ms: float) -> Figures:
    """Compute the figures of one trial.

    queue_wait: in seconds.
    """
    done = [record for record in records if record.error is None]
    seconds = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    gaps = [max(record.gaps, default=0.0) * 1e3 for record in done]
    classes = sorted({record.priority for record in records})
    return Figures(
        completed=len(done),
        errors=len(records) - len(done),
        output_tokens_per_s=sum(record.tokens for record in done) / seconds if seconds > 0 else 0.0,
        ttft=_pick((record.ttft for record in done), 1e3),
        itl=_pick((gap for record in done for gap in record.gaps), 1e3),
        tpot=_pick((record.tpot for record in done), 1e3),
        request_tokens_per_s=_pick(record.tokens / record.e2e for record in done if record.e2e > 0),
        queue_wait={name: value * 1e3 for name, value in queue_wait.items()},
        starved=sum(gap > starved_ms for gap in gaps),
        longest_gap=max(gaps, default=0.0),
        ttft_by_priority={
            priority: _pick((record.ttft for record in done if record.priority == priority), 1e3)
            for priority in classes
            if len(classes) > 1
        },
    )


def median_of(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the trials.

    Figures missing in a trial are left out.
    """
    shared = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: statistics.median(sample[name] for sample in samples) for name in shared}


def medians(trials: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the trials."""

    def number(name: str) -> float:
        return float(statistics.median(getattr(trial, name) for trial in trials))

    def percentiles(name: str) -> Percentiles:
        return median_of([getattr(trial, name) for trial in trials])

    numbers = ("completed", "errors", "output_tokens_per_s", "starved", "longest_gap")
    samples = ("ttft", "itl", "tpot", "request_tokens_per_s", "queue_wait")
    found: dict[str, Any] = {name: number(name) for name in numbers} | {name: percentiles(name) for name in samples}
    classes = trials[0].ttft_by_priority
    by_priority = {
        priority: median_of([trial.ttft_by_priority.get(priority, {}) for trial in trials]) for priority in classes
    }
    return Figures(**found, ttft_by_priority=by_priority)


def prefill_medians(trials: Sequence[PrefillTrial]) -> PrefillGaps:
    """Return the median of each figure over the trials, and the totals of counts."""
    overs = {percent: [trial.over(percent) for trial in trials] for percent in ("p50", "p99")}
    return PrefillGaps(
        median_of([trial.alone for trial in trials]),
        median_of([trial.loaded for trial in trials]),
        int(sum(trial.loaded["count"] for trial in trials)),
        sum(trial.prompts for trial in trials),
        median_of([trial.prompt_ttft for trial in trials]),
        {percent: [value for value in values if value is not None] for percent, values in overs.items()},
    )
