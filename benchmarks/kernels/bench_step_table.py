"""Step times of a shape, as the engine measures them at startup.

    python -m benchmarks.kernels.bench_step_table --shape benchmarks/shapes/llama-3.1-8b [--max-rows 1024]
        [--quantize fp8] [--profile 256:0 256:512] [--save NAME]

Prints the milliseconds of each captured step by prompt tokens and decoding rows, with random weights and almost no
context. The scheduler uses this table to limit prompts while rows decode (`engine_core/scheduler/step_costs.py`). The
last column is the time of the prompts' matmuls alone at 790 TFLOP/s, twice that with --quantize fp8. --profile lists
the kernels of single steps (rows and tokens of one prompt) with their microseconds and launches. Tokens are routed to
experts uniformly. `bench_decode` compares the table with the decode steps that an engine runs.
"""

import argparse
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.results import save
from tandem.engine_core.attention.base import Span
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.plan import PADDING_ROW
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.startup.step_timing import fill_inputs
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tests.fakes.mailbox import FakeMailbox

FLOPS = {"off": 7.9e14, "fp8": 15.8e14}
"""Peak matmul throughput."""
REPLAYS, KERNELS = 10, 24
"""Replays of a profiled step, and kernels to list."""


@torch.inference_mode()
def profile(runtime: Any, rows: int, tokens: int) -> None:
    """Print the time of each kernel of a captured step.

    tokens: length of the step's one prompt; the rows have no context.
    """
    if tokens:
        mixed = runtime.graphs.mixed[0][GraphBucket(rows, tokens)]
        mixed.prompts.plan([Span(PADDING_ROW, 0, 0, tokens)])
        mixed.prompts.gather_pages()
        graph = mixed.forward
    else:
        graph = runtime.graphs.decode[0][rows].forward
    fill_inputs(runtime, GraphBucket(rows, tokens))
    graph.replay()
    runtime.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS):
            graph.replay()
        runtime.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / REPLAYS
    print(f"{rows} rows, {tokens} positions of a prompt: kernels {total:.0f} us")
    for event in events[:KERNELS]:
        share = event.self_device_time_total / REPLAYS
        print(f"  {share:>8.1f} us {event.count / REPLAYS:>6.1f} launches  {event.key[:120]}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--max-rows", type=int, help="as of `tandem serve`")
    parser.add_argument("--quantize", default="off", choices=tuple(FLOPS), help="as of `tandem serve`")
    parser.add_argument("--profile", nargs="+", default=[], metavar="ROWS:TOKENS", help="captured steps to profile")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    model = read_config(arguments.shape)
    options = EngineOptions(
        model=str(arguments.shape),
        load_format="dummy",
        device=arguments.device,
        max_rows=arguments.max_rows,
        max_len=min(4096, model.max_positions),
        kv_tokens=65_536,
        quantize=arguments.quantize,
    )
    engine = build_engine(options, FakeMailbox(), Status(1, new_stats()))
    found = engine.scheduler.planner.costs.table
    rows = sorted({rows for rows, tokens in found if tokens})
    print("decode steps: " + ", ".join(f"{size} rows {found[size, 0]:.2f}" for size, none in sorted(found) if not none))
    flops = FLOPS[arguments.quantize]
    print("tokens" + "".join(f"{count:>9}" for count in rows) + "  ceiling")
    for tokens in sorted({tokens for _, tokens in found if tokens}):
        cells = "".join(f"{found[count, tokens]:>9.2f}" if (count, tokens) in found else f"{'-':>9}" for count in rows)
        print(f"{tokens:>6}{cells}{2e3 * tokens * model.active_weights / flops:>9.2f}", flush=True)
    for step in arguments.profile:
        routing = engine.runtime.model.routing  # type: ignore[attr-defined]
        with nullcontext() if routing is None else routing.uniform():
            profile(engine.runtime, *map(int, step.split(":")))
    if arguments.save:
        steps = [{"rows": rows, "tokens": tokens, "ms": ms} for (rows, tokens), ms in sorted(found.items())]
        config = {"shape": arguments.shape.name, "max_rows": arguments.max_rows, "device": arguments.device}
        config |= {"quantize": arguments.quantize}
        config |= {"gpu": torch.cuda.get_device_name()} if arguments.device == "cuda" else {}
        print(save(arguments.save, config, {"steps": steps}))


if __name__ == "__main__":
    main()
