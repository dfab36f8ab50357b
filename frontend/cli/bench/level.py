"""Results of one load level, from the records of all clients.

Failed requests count as errors and against goodput, and are excluded from throughput and latency. The duration of a
level is from the first request's start to the last one's end, including the tail.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from tandem.frontend.cli.bench.distribution import QUANTILES, distribution
from tandem.frontend.cli.bench.record import Record, Share
from tandem.frontend.cli.bench.workloads import Load


@dataclass(frozen=True)
class Slo:
    """Latency objectives in milliseconds."""

    ttft_ms: float
    tpot_ms: float
    e2el_ms: float = math.inf

    def met(self, record: Record) -> bool:
        """Return True if a response meets all objectives.

        A response with a single token has no TPOT and is judged by TTFT only.
        """
        if record.error is not None or record.ttft is None:
            return False
        has_pace = record.tpot is None or record.tpot * 1e3 <= self.tpot_ms
        return record.ttft * 1e3 <= self.ttft_ms and has_pace and record.e2e * 1e3 <= self.e2el_ms


class Goodput(Struct):
    ttft_slo_ms: float
    tpot_slo_ms: float
    good: int
    share: float
    """Fraction of all requests, including failed ones."""
    requests_per_s: float


class Level(Struct):
    load: Load
    seconds: float
    completed: int
    errors: dict[str, int]
    error_example: str
    output_tokens: int
    prompt_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    concurrency: float
    """Mean number of concurrent requests."""
    other_length: int
    """Number of complete responses with an unexpected number of tokens."""
    counted_by: dict[str, int]
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    lag_ms: dict[str, float]
    goodput: Goodput
    client_cpu_percent: list[float]
    """CPU usage of each client process during the level, in percent of a core."""


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def summarise(load: Load, shares: list[Share], slo: Slo, percentiles: Sequence[float] = QUANTILES) -> Level:
    """Results of a level."""
    records = [record for share in shares for record in share.records]
    done = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    seconds = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    rate = 1.0 / seconds if seconds > 0 else 0.0
    output, prompt = sum(r.tokens for r in done), sum(r.prompt_tokens for r in done)
    good = sum(map(slo.met, records))
    return Level(
        load=load,
        seconds=seconds,
        completed=len(done),
        errors=dict(Counter(str(record.error) for record in failed).most_common()),
        error_example=f"{failed[0].error}: {failed[0].detail}" if failed else "",
        output_tokens=output,
        prompt_tokens=prompt,
        output_tokens_per_s=output * rate,
        total_tokens_per_s=(output + prompt) * rate,
        requests_per_s=len(done) * rate,
        concurrency=math.fsum(record.e2e for record in records) * rate,
        other_length=sum(record.tokens != record.asked for record in done),
        counted_by=dict(Counter(record.counted_by for record in done)),
        ttft_ms=distribution(_present(record.ttft for record in done), 1e3, percentiles),
        tpot_ms=distribution(_present(record.tpot for record in done), 1e3, percentiles),
        itl_ms=distribution((gap for record in done for gap in record.gaps), 1e3, percentiles),
        e2e_ms=distribution((record.e2e for record in done), 1e3, percentiles),
        lag_ms=distribution((record.lag for record in done), 1e3),
        goodput=Goodput(slo.ttft_ms, slo.tpot_ms, good, good / len(records) if records else 0.0, good * rate),
        client_cpu_percent=[100 * share.cpu_seconds * rate for share in shares],
    )
