"""`tandem bench`: measure throughput and latency of an OpenAI-compatible server.

Prompts are random token ids, sent to /v1/completions. Failed requests enter no throughput and no latency.
"""

import argparse
import math
import ssl
import sys
import time
from collections.abc import Iterator

import httpx
import msgspec

from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import ClientDiedError, Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.level import Level, Slo, summarise
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.cli.connection import client, headers, timeouts
from tandem.frontend.cli.connection_failure import connection_failure, is_permanent
from tandem.frontend.cli.flags import api_key, trust
from tandem.frontend.cli.server_address import base_url
from tandem.frontend.progress import Progress

_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_PROMPT_IDS = Span(100, 400)
"""Token ids of prompts: ordinary tokens even of a small vocabulary."""
_SLO = Slo(math.inf, math.inf)
_RETRY_SECONDS = 0.5
_LIST_SECONDS = 10.0
"""Longest time between two bytes of the list of models."""


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, print the results and return 1 if a request failed."""
    key, trusted = api_key(arguments) or "", trust(arguments)
    try:
        load = load_of(arguments)
        endpoint = Endpoint.parse(arguments.url, key, trusted)
        model = wait_for_model(arguments.url, key, trusted.context(), arguments.wait)
        length = Span(arguments.random_input_len, arguments.random_input_len)
        answer = Span(arguments.random_output_len, arguments.random_output_len)
        workload = Workload(arguments.seed, length, answer, _PROMPT_IDS)
        dialect = Dialect(arguments.model or model, 0.0, arguments.ignore_eos)
        level = measure(Job([endpoint], dialect, workload, load, arguments.timeout), arguments.clients)
        if arguments.json is not None:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(level)) + b"\n")
    except (OSError, ValueError, ClientDiedError) as error:
        print(f"tandem bench: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines_of(level)))
    return 1 if level.errors else 0


def load_of(arguments: argparse.Namespace) -> Load:
    """Build the load that the flags describe.

    Raises ValueError for flags that exclude each other.
    """
    number, rate, most = arguments.num_prompts, arguments.request_rate, arguments.max_concurrency
    if rate is not None:
        if most is not None:
            raise ValueError("--request-rate and --max-concurrency exclude each other; leave one out")
        return Load("bench", rate=rate, requests=number)
    streams = min(number, most or number)
    return Load("bench", streams, requests=-(-number // streams), most=number)


def wait_for_model(url: str, key: str, context: ssl.SSLContext, seconds: float) -> str:
    """Wait until a server lists its models and return the name of the first.

    Raises OSError if it does not within some seconds, ValueError for another refusal and for a certificate that is not
    trusted.
    """
    deadline, said = time.monotonic() + seconds, False
    with client(url, headers(key), timeouts(_LIST_SECONDS), context) as http:
        while True:
            try:
                response = http.get(f"{base_url(url)}/v1/models")
                if response.status_code == 200:
                    return str(response.json()["data"][0]["id"])
                if response.status_code not in (429, 502, 503, 504):
                    raise ValueError(f"{url}/v1/models answered {response.status_code}: {response.text[:200]}")
                reason = f"it answers {response.status_code}"
            except httpx.HTTPError as error:
                if is_permanent(error):
                    raise ValueError(connection_failure(url, error)) from None
                reason = str(error) or type(error).__name__
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{url}/v1/models lists no model") from None
            if time.monotonic() >= deadline:
                raise OSError(f"no server is ready on {url} after {seconds:g} s ({reason}); start it, or raise --wait")
            if not said:
                print(f"waiting for {url} ({reason})", file=sys.stderr)
                said = True
            time.sleep(_RETRY_SECONDS)


def measure(job: Job, processes: int) -> Level:
    """Send a load from client processes and summarise it."""
    progress = Progress(job.load.label, job.load.total(), None)
    with Clients(processes) as clients:
        shares = clients.run(job, progress)
    progress.clear()
    return summarise(job.load, shares, _SLO)


def lines_of(level: Level) -> Iterator[str]:
    """Yield the results as lines of a table."""
    for name, value in (
        ("completed", f"{level.completed:,}"),
        ("failed", f"{sum(level.errors.values()):,}"),
        ("duration s", f"{level.seconds:.2f}"),
        ("requests/s", f"{level.requests_per_s:.2f}"),
        ("output tokens", f"{level.output_tokens:,}"),
        ("output tokens/s", f"{level.output_tokens_per_s:,.1f}"),
        ("total tokens/s", f"{level.total_tokens_per_s:,.1f}"),
        ("mean concurrency", f"{level.concurrency:.1f}"),
    ):
        yield f"{name:<18}{value:>14}"
    yield ""
    yield f"{'ms':<6}" + "".join(f"{column:>12}" for column in _COLUMNS)
    for name, attribute in _LATENCIES:
        sample: dict[str, float] = getattr(level, attribute)
        cells = [f"{sample[column]:,.2f}" if column in sample else "-" for column in _COLUMNS]
        yield f"{name:<6}" + "".join(f"{cell:>12}" for cell in cells)
    if level.errors:
        yield ""
        yield f"failed: {', '.join(f'{count} x {kind}' for kind, count in level.errors.items())}"
        yield f"the first: {level.error_example}"
    if level.other_length:
        yield f"note: {level.other_length} answers have another length than was asked for"
