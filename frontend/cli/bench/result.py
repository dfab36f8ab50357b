"""The results of `tandem bench`, with the names of `vllm bench serve`."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from tandem.frontend.cli.bench.level import Level

_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_WIDTH = 50


class Result(Struct):
    """Figures of one run, with the load that was asked for."""

    model: str
    request_rate: float
    """Arrivals a second; inf for all at once."""
    max_concurrency: int | None
    percentiles: Sequence[float]
    """Percentiles to report for each latency."""
    has_objectives: bool
    """True to report goodput."""
    level: Level

    def lines(self, metrics: Sequence[str]) -> Iterator[str]:
        """Yield the lines of the table, with some of the latencies, and what has failed.

        The table is left out if nothing has succeeded.
        """
        level = self.level
        if level.completed or not level.errors:
            yield from self._table_lines(metrics)
        if level.errors:
            yield f"failed: {', '.join(f'{count} x {kind}' for kind, count in level.errors.items())}"
            yield f"the first: {level.error_example}"
        if level.other_length:
            yield f"note: {level.other_length} answers have another length than was asked for"

    def _table_lines(self, metrics: Sequence[str]) -> Iterator[str]:
        level = self.level
        yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
        rows: list[tuple[str, str]] = [
            ("Successful requests:", str(level.completed)),
            ("Failed requests:", str(sum(level.errors.values()))),
        ]
        if self.max_concurrency is not None:
            rows.append(("Maximum request concurrency:", str(self.max_concurrency)))
        if self.request_rate != math.inf:
            rows.append(("Request rate configured (RPS):", f"{self.request_rate:.2f}"))
        rows += [
            ("Benchmark duration (s):", f"{level.seconds:.2f}"),
            ("Total input tokens:", str(level.prompt_tokens)),
            ("Total generated tokens:", str(level.output_tokens)),
            ("Request throughput (req/s):", f"{level.requests_per_s:.2f}"),
        ]
        if self.has_objectives:
            rows.append(("Request goodput (req/s):", f"{level.goodput.requests_per_s:.2f}"))
        rows += [
            ("Output token throughput (tok/s):", f"{level.output_tokens_per_s:.2f}"),
            ("Mean concurrent requests:", f"{level.concurrency:.2f}"),
            ("Total token throughput (tok/s):", f"{level.total_tokens_per_s:.2f}"),
        ]
        yield from _table(rows)
        for metric in metrics:
            yield f"{_HEADINGS[metric]:-^{_WIDTH}}"
            named = (f"{word} {metric.upper()} (ms):" for word in ("Mean", "Median", *map(_word, self.percentiles)))
            figures = ("-" if value is None else f"{value:.2f}" for value in self._figures(metric))
            yield from _table(list(zip(named, figures, strict=True)))
        yield "=" * _WIDTH

    def figures(self) -> dict[str, Any]:
        """Return all figures by vLLM's names.

        vLLM does not have `errors_by_kind` and `mean_concurrent_requests`. A latency without samples is None.
        """
        level = self.level
        found: dict[str, Any] = {
            "model_id": self.model,
            "num_prompts": level.completed + sum(level.errors.values()),
            "request_rate": "inf" if self.request_rate == math.inf else self.request_rate,
            "max_concurrency": self.max_concurrency,
            "duration": level.seconds,
            "completed": level.completed,
            "failed": sum(level.errors.values()),
            "total_input_tokens": level.prompt_tokens,
            "total_output_tokens": level.output_tokens,
            "request_throughput": level.requests_per_s,
            "request_goodput": level.goodput.requests_per_s if self.has_objectives else None,
            "output_throughput": level.output_tokens_per_s,
            "total_token_throughput": level.total_tokens_per_s,
            "mean_concurrent_requests": level.concurrency,
            "errors_by_kind": level.errors,
        }
        for metric in _HEADINGS:
            words = ("mean", "median", *(_word(percent).lower() for percent in self.percentiles))
            found |= {f"{word}_{metric}_ms": value for word, value in zip(words, self._figures(metric), strict=True)}
        return found

    def default_name(self, now: datetime) -> str:
        """Return the name of a file of results that was given none."""
        limit = "" if self.max_concurrency is None else f"-concurrency{self.max_concurrency}"
        return f"tandem-{self.request_rate:g}qps{limit}-{Path(self.model).name}-{now:%Y%m%d-%H%M%S}.json"

    def _figures(self, metric: str) -> list[float | None]:
        """Return mean, median and the percentiles of a latency, in milliseconds."""
        level = self.level
        sample = {"ttft": level.ttft_ms, "tpot": level.tpot_ms, "itl": level.itl_ms, "e2el": level.e2e_ms}[metric]
        return [sample.get(key) for key in ("mean", "p50", *(f"p{percent:g}" for percent in self.percentiles))]


def _word(percent: float) -> str:
    return f"P{percent:g}"


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, value in rows:
        yield f"{name:<40} {value:<10}".rstrip()
