"""`tandem bench`: measure throughput and latency of an OpenAI-compatible server.

Prompts are random token ids, sent to /v1/completions. Failed requests are excluded from throughput and latency.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import ClientDiedError, Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.level import Level, Slo, summarise
from tandem.frontend.cli.bench.ready_check import wait_for_model
from tandem.frontend.cli.bench.result import Result
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.cli.flags import api_key, trust
from tandem.frontend.progress import Progress

_PROMPT_IDS = Span(100, 400)
"""Range of prompt token ids: ordinary tokens even of a small vocabulary."""


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, print the results and return 1 if a request failed."""
    key, trusted = api_key(arguments) or "", trust(arguments)
    objectives = dict(arguments.goodput or ())
    slo = Slo(*(objectives.get(name, math.inf) for name in ("ttft", "tpot", "e2el")))
    result: Result | None = None
    try:
        load = load_of(arguments)
        endpoint = Endpoint.parse(arguments.url, key, trusted)
        model = wait_for_model(
            arguments.url, key, trusted.context(), arguments.ready_check_timeout_sec, arguments.model or None
        )
        job = Job(
            [endpoint], Dialect(model, 0.0, arguments.ignore_eos), workload_of(arguments), load, arguments.timeout
        )
        percentiles = arguments.metric_percentiles
        level = measure(job, min(arguments.clients, load.in_flight or arguments.clients), slo, (50, *percentiles))
        result = Result(model, arguments.request_rate, arguments.max_concurrency, percentiles, bool(objectives), level)
        if (path := result_path(arguments, result)) is not None:
            _write(path, result)
    except (OSError, ValueError, ClientDiedError) as error:
        print(f"tandem bench: {error}", file=sys.stderr)
        failed = True
    else:
        failed = bool(level.errors)
    if result is not None:
        print("\n".join(result.lines(arguments.percentile_metrics)))
    return int(failed)


def _write(path: Path, result: Result) -> None:
    """Write the results.

    Raises ValueError with the path and the reason on failure.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result.figures())) + b"\n")
    except OSError as error:
        raise ValueError(f"the results cannot be written to {path}: {error.strerror}") from None


def load_of(arguments: argparse.Namespace) -> Load:
    """Build the load from the flags."""
    number, rate, most = arguments.num_prompts, arguments.request_rate, arguments.max_concurrency
    if rate != math.inf:
        return Load("bench", rate=rate, requests=number, in_flight=most)
    streams = min(number, most or number)
    return Load("bench", streams, requests=-(-number // streams), most=number)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Build the requests from the flags."""
    ratio = arguments.random_range_ratio
    lengths = _span(arguments.random_input_len, ratio), _span(arguments.random_output_len, ratio)
    return Workload(arguments.seed, *lengths, _PROMPT_IDS, shared=arguments.random_prefix_len)


def _span(length: int, ratio: float) -> Span:
    """Return the lengths from (1 - ratio) to (1 + ratio) times a length."""
    return Span(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))


def result_path(arguments: argparse.Namespace, result: Result) -> Path | None:
    """Return the path for the results; None to discard them."""
    if arguments.json is not None:
        return Path(arguments.json)
    if not arguments.save_result:
        return None
    name = arguments.result_filename or result.default_name(datetime.now())
    return Path(arguments.result_dir or ".") / name


def measure(job: Job, processes: int, slo: Slo, percentiles: Sequence[float]) -> Level:
    """Send a load from client processes and summarize it."""
    progress = Progress(job.load.label, job.load.total(), None)
    with Clients(processes) as clients:
        shares = clients.run(job, progress)
    progress.clear()
    return summarise(job.load, shares, slo, percentiles)
