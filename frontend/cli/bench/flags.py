"""Flags of `tandem bench`, named as in `vllm bench serve`."""

import argparse
import os
from pathlib import Path

from tandem.frontend.cli.parsing.foreign_flags import Alias, ForeignFlag
from tandem.frontend.flags.flag import Flag

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Names of the latencies: time to first token, time per output token, inter-token latency, end-to-end latency."""

# fmt: off
BENCH_FLAGS = (
    Flag("num_prompts", "load", "number of requests", int, (1, 10**7), default=100),
    Flag("request_rate", "load", "requests a second, as Poisson arrivals; inf sends all at once", float,
         (1e-6, float("inf")), metavar="RATE", default=float("inf")),
    Flag("max_concurrency", "load", "maximum number of requests in flight", int, (1, 10**6), default_text="no limit"),
    Flag("dataset_name", "load", "prompts to send: random token ids", choices=("random",), default="random"),
    Flag("random_input_len", "load", "tokens of each prompt", int, (1, 2**20), default=256),
    Flag("random_output_len", "load", "tokens of each answer", int, (1, 2**20), default=128),
    Flag("random_range_ratio", "load", "share by which both lengths vary: 0.5 draws from half to one and a half times "
         "the length", float, (0, 0.999), metavar="RATIO", default=0.0),
    Flag("random_prefix_len", "load", "tokens that all prompts begin with, besides --random-input-len", int,
         (0, 2**20), default=0),
    Flag("seed", "load", "seed of prompts and arrivals; change it between runs if the server caches prefixes", int,
         (0, 2**63), default=0),
    Flag("clients", "load", "number of client processes", int, (1, 256), default=min(4, os.cpu_count() or 1)),
    Flag("ready_check_timeout_sec", "server", "seconds to wait for a server that does not answer yet, or is not ready",
         float, (0, 1e7), metavar="SECONDS", default=0.0),
    Flag("save_result", "results", "write the results to a JSON file, with the names of vLLM's", is_switch=True,
         default=False),
    Flag("result_dir", "results", "folder of that file, which is made", Path, metavar="DIR",
         default_text="the current one"),
    Flag("result_filename", "results", "name of that file", default_text="tandem-RATEqps-MODEL-TIME.json",
         metavar="NAME"),
)
# fmt: on
FOREIGN_BENCH_FLAGS = {
    "--host": ForeignFlag("--url", "http://HOST:PORT"),
    "--port": ForeignFlag("--url", "http://HOST:PORT"),
    "--backend": ForeignFlag(
        reason="requests go to /v1/completions, as with the backends openai and vllm; leave it out"
    ),
    "--endpoint": ForeignFlag(reason="requests go to /v1/completions; leave it out"),
    "--tokenizer": ForeignFlag(reason="prompts are token ids and the server counts its tokens; leave it out"),
    "--trust-remote-code": ForeignFlag(reason="no model or tokenizer is loaded; leave it out"),
    "--served-model-name": ForeignFlag("--model"),
    "--burstiness": ForeignFlag(reason="arrivals are a Poisson process, burstiness 1; leave it out"),
    "--num-warmups": ForeignFlag(reason="a first run with few --num-prompts warms the server"),
    "--disable-tqdm": ForeignFlag(reason="the bar is drawn on a terminal only; leave it out"),
}  # fmt: skip
"""Messages for flags of `vllm bench serve` that have another or no meaning here."""
BENCH_ALIASES = {"--input-len": Alias("--random-input-len"), "--output-len": Alias("--random-output-len")}
"""Flags of `vllm bench serve` with the same meaning here."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are not in BENCH_FLAGS, and hidden former names."""
    parser.add_argument("serve", nargs="?", choices=["serve"], help=argparse.SUPPRESS)  # as in `vllm bench serve`
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the first one of the server)")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the whole length; off for servers without this field, such as OpenAI's (default: on)",
    )
    results = next(group for group in parser._action_groups if group.title == "results")
    results.add_argument(
        "--percentile-metrics",
        type=_latencies,
        metavar="LIST",
        default=("ttft", "tpot", "itl"),
        help=f"latencies to print, of {','.join(LATENCIES)} (default: ttft,tpot,itl)",
    )
    results.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        metavar="LIST",
        default=(99.0,),
        help="percentiles of each latency, such as 50,90,99 (default: 99)",
    )
    results.add_argument(
        "--goodput",
        nargs="+",
        type=_objective,
        metavar="NAME:MS",
        help="most milliseconds that a request may take, such as ttft:500 tpot:50 e2el:9000; prints how many requests "
        "a second keep to all of them",
    )
    parser.add_argument(
        "--wait", dest="ready_check_timeout_sec", type=float, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)


def _latencies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in LATENCIES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(LATENCIES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 50,90,99") from None
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentile that is not from 0 to 100")
    return found


def _objective(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    try:
        milliseconds = float(number)
    except ValueError:
        milliseconds = -1.0
    if name not in ("ttft", "tpot", "e2el") or not milliseconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of ttft:MS, tpot:MS, e2el:MS, such as ttft:500")
    return name, milliseconds
