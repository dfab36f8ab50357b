"""Throughput and latency of an OpenAI-compatible server.

    python -m benchmarks.bench_serving --url http://host:port[,http://host:port2] --model NAME
        [--streams 1 16 64 256 | --rate 4 8 16] [--input-len 256] [--output-len 128] [--requests N | --duration S]

The load is either a number of concurrent streams or an arrival rate.
Closed loop (--streams): each of the streams sends its next request as soon as the last one is answered.
Open loop (--rate): Poisson arrivals, sent whether or not the server keeps up. Prompts are token ids, seeded.

TTFT: from sending to the first chunk with output. TPOT: (last chunk - first chunk) / (tokens - 1) of one request.
ITL: gaps between chunks; with --token-ids divided over the tokens of a chunk. Percentiles are linear between ranks.
Goodput: requests with TTFT and TPOT both within --ttft-slo and --tpot-slo. Tokens are the server's own `usage`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measuring.plots import PlottingUnavailableError, plot_serving, pyplot
from benchmarks.measuring.results import save
from benchmarks.serving.reference import Reference, load_reference
from benchmarks.serving.table import number, reference_table, remarks, table
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import ClientDiedError, Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.level import Level, Slo, summarise
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.progress import Progress

STREAMS = [1, 16, 64, 256]
REQUESTS = 10


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", required=True, help="one or more http://host:port, separated by commas; used round-robin"
    )
    parser.add_argument("--model", required=True, help="name of the model on the server")
    load = parser.add_argument_group("load")
    load.add_argument("--streams", type=int, nargs="+", help=f"closed loop, one level each (default {STREAMS})")
    load.add_argument("--rate", type=float, nargs="+", help="open loop instead: requests/s, one level each")
    load.add_argument(
        "--requests", type=int, help=f"requests per stream (default {REQUESTS}), or in total under --rate"
    )
    load.add_argument("--duration", type=float, help="seconds to send requests for, instead of --requests")
    load.add_argument("--warmup", type=int, default=1, help="requests per stream before each level (default 1)")
    load.add_argument("--input-len", type=Span.parse, default="256", help="tokens, N or LOW:HIGH (default 256)")
    load.add_argument("--output-len", type=Span.parse, default="128", help="tokens, N or LOW:HIGH (default 128)")
    load.add_argument("--prompt-ids", type=Span.parse, default="100:1000", help="token ids drawn (default 100:1000)")
    load.add_argument(
        "--seed", type=int, default=0, help="seed; change it between runs if prefixes are cached (default 0)"
    )
    client = parser.add_argument_group("client")
    client.add_argument(
        "--clients", type=int, default=min(4, os.cpu_count() or 1), help="processes (default %(default)s)"
    )
    client.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take (default 600)")
    body = parser.add_argument_group("what a request says")
    body.add_argument("--temperature", type=float, default=0.0, help="(default 0)")
    body.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="(default on)")
    body.add_argument("--token-ids", action="store_true", help="ask for ids in each chunk, for ITL by token")
    body.add_argument("--plain-openai", action="store_true", help="send only fields of OpenAI's own API")
    report = parser.add_argument_group("report")
    report.add_argument("--ttft-slo", type=float, default=500.0, help="ms, for goodput (default 500)")
    report.add_argument("--tpot-slo", type=float, default=50.0, help="ms, for goodput (default 50)")
    report.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw the levels (needs matplotlib)")
    report.add_argument("--reference", type=Path, help="figures to compare with, as in benchmarks/reference/")
    return parser


def loads(arguments: argparse.Namespace) -> list[Load]:
    """Build the loads that the flags describe. Raises ValueError."""
    number_of, seconds = arguments.requests, arguments.duration
    if arguments.rate is not None:
        if arguments.streams is not None:
            raise ValueError("--streams and --rate exclude each other")
        return [Load(f"{rate:g}/s", rate=rate, requests=number_of, duration=seconds) for rate in arguments.rate]
    if number_of is None and seconds is None:
        number_of = REQUESTS
    return [
        Load(f"{streams} stream{'s' if streams > 1 else ''}", streams, requests=number_of, duration=seconds)
        for streams in arguments.streams or STREAMS
    ]


class Run:
    """Measurement of a command's loads in order."""

    def __init__(self, arguments: argparse.Namespace, clients: Clients) -> None:
        self._clients = clients
        self._warmup, self._timeout = arguments.warmup, arguments.timeout
        self._endpoints = [Endpoint.parse(url) for url in arguments.url.split(",")]
        if arguments.plain_openai and arguments.token_ids:
            raise ValueError("--plain-openai has no token ids to ask for; leave --token-ids out")
        ignore_eos = arguments.ignore_eos and not arguments.plain_openai
        self._dialect = Dialect(arguments.model, arguments.temperature, ignore_eos, arguments.token_ids)
        self._workload = Workload(arguments.seed, arguments.input_len, arguments.output_len, arguments.prompt_ids)
        self._slo = Slo(arguments.ttft_slo, arguments.tpot_slo)

    def level(self, load: Load) -> Level:
        """Warm up, then measure one load.

        Raises ConnectionError if the warm-up fails.
        """
        if self._warmup > 0:
            warm = self._send(Load(f"warmup {load.label}", load.streams or 1, requests=self._warmup))
            if not warm.completed:
                raise ConnectionError(f"no request of the warm-up succeeded; {warm.error_example}")
        return self._send(load)

    def _send(self, load: Load) -> Level:
        progress = Progress(load.label, load.total(), load.duration)
        job = Job(self._endpoints, self._dialect, self._workload, load, self._timeout)
        shares = self._clients.run(job, progress)
        progress.clear()
        return summarise(load, shares, self._slo)


def report(arguments: argparse.Namespace, levels: list[Level], reference: Reference | None) -> None:
    print(table(levels))
    for remark in remarks(levels):
        print(f"note: {remark}")
    if reference is not None:
        print("\n" + reference_table(levels, reference))
        ours = (str(arguments.input_len), str(arguments.output_len))
        if ours != (reference.input_len, reference.output_len):
            print(f"note: the reference is for {reference.input_len} tokens in and {reference.output_len} out")
    if arguments.save:
        figures: dict[str, Any] = {"levels": msgspec.to_builtins(levels)}
        if reference is not None:
            figures["reference"] = msgspec.to_builtins(reference)
        config = {
            name: value if isinstance(value, int | float | list) else str(value)
            for name, value in vars(arguments).items()
            if value is not None
        }
        print(save(arguments.save, config, figures))
    if arguments.plot:
        title = f"{arguments.model}: {arguments.input_len} tokens in, {arguments.output_len} out"
        plot_serving(arguments.plot, title, levels, reference)
        print(arguments.plot)


def main(argv: list[str] | None = None) -> None:
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.clients < 1:
            raise ValueError("--clients must be at least 1")
        planned = loads(arguments)
        reference = load_reference(arguments.reference) if arguments.reference else None
        if arguments.plot:
            # Fail now rather than after minutes of measuring.
            pyplot()
        clients = Clients(arguments.clients)
        run = Run(arguments, clients)
    except (OSError, ValueError, PlottingUnavailableError) as error:
        parser.error(str(error))
    levels = []
    try:
        with clients:
            for load in planned:
                levels.append(run.level(load))
                level = levels[-1]
                print(f"{load.label}: {number(level.output_tokens_per_s)} output tokens/s", file=sys.stderr)
    except (ConnectionError, ClientDiedError) as error:
        sys.exit(f"bench_serving: {error}")
    report(arguments, levels, reference)


if __name__ == "__main__":
    main()
