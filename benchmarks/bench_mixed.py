"""Decode steps with and without chunks of a long prompt.

    python -m benchmarks.bench_mixed --shape benchmarks/shapes/llama-3.2-1b [--rows 16 64] [--chunks 64] [--save NAME]

Uses random weights, greedy sampling and no prefix cache. For each chunk size, the steps of decoding rows are timed
without prompts, then with prompts that arrive one after the other. Only the chunk size limits a step; chunk 0 means the
default limit by time, or --max-itl. A step is one tick of the loop, in milliseconds. The mailbox is a test double, so
sockets and HTTP are excluded. The lower bound of a prompt is the time of its FLOPs at 790 TFLOP/s.
"""

import argparse
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from msgspec import structs

from benchmarks.measuring.results import save
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.frontend.cli.bench.distribution import distribution
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort, Hello, Submit
from tandem.protocol.engine_options import Device, EngineOptions
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox

CLIENT, EPOCH = b"bench", 1
OWN_PROMPT, SETTLED, ALONE, PROMPTS = 16, 500, 150, 3
"""Tokens of a decoding row's prompt, untimed steps, steps timed without prompts, and prompts per chunk size."""
FLOPS = 7.9e14
UNLIMITED_MS = 1e6
MIN_CHUNK, LARGEST_STEP = 64, 2048
"""Minimum assumed and maximum possible prompt tokens of a step that is limited by time."""
Key = tuple[bytes, int]


@dataclass
class Figures:
    """Figures of a number of rows and a chunk size; times are in milliseconds."""

    rows: int
    chunk: int
    """Maximum prompt tokens of a step; 0 if limited by time."""
    alone: dict[str, float]
    with_chunk: dict[str, float]
    """Milliseconds of the steps from a prompt's arrival to its first token."""
    ttft: float
    """Median TTFT of the prompts, in milliseconds."""
    ceiling: float
    """Lower bound of `ttft` in milliseconds."""

    def over(self, percent: str) -> float:
        """Return a percentile of the steps with a chunk, relative to the median without."""
        return self.with_chunk[percent] / self.alone["p50"]


class Bench:
    """Engine with a chunk size that changes between runs."""

    def __init__(
        self, shape: Path, device: Device, rows: int, chunk: int, prompt: int, steps: int, max_itl: float | None
    ) -> None:
        self.mailbox = FakeMailbox()
        max_len = max(prompt + 1, OWN_PROMPT + steps)
        options = EngineOptions(
            model=str(shape),
            load_format="dummy",
            device=device,
            max_rows=rows + 4,
            max_len=max_len,
            kv_tokens=rows * (OWN_PROMPT + steps) + 4 * max_len,
            max_step_tokens=chunk + rows + 4,
            prefix_cache="off",
        )
        self.engine = build_engine(options, self.mailbox, Status(EPOCH, new_stats()))
        self.prompt, self.steps, self.max_itl = prompt, steps, max_itl
        self.requests = 0
        self.rng = random.Random(0)
        self.mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "bench")))

    def submit(self, prompt: int, output: int) -> Key:
        self.requests += 1
        ids = pack_ids([self.rng.randrange(100, 1000) for _ in range(prompt)])
        params = SamplingParams(output, temperature=0.0, ignore_eos=True)
        self.mailbox.inbox.append((CLIENT, Submit(self.requests, ids, params)))
        return CLIENT, self.requests

    def tick(self) -> float:
        started = time.perf_counter()
        self.engine.tick()
        return time.perf_counter() - started

    def run(self, rows: int, chunks: list[int]) -> list[Figures]:
        keys = [self.submit(OWN_PROMPT, self.steps) for _ in range(rows)]
        while not self.mailbox.received[keys[-1]]:
            self.tick()
        for _ in range(SETTLED):
            self.tick()
        found = [self.measure(rows, chunk) for chunk in chunks]
        assert not any(key in self.mailbox.outcomes for key in keys), "the rows were to decode until now"
        self.mailbox.inbox.append((CLIENT, Abort([number for _, number in keys])))
        while self.engine.pipeline.in_flight:
            self.tick()
        return found

    def measure(self, rows: int, chunk: int) -> Figures:
        planner = self.engine.scheduler.planner
        longest, max_itl = (chunk, UNLIMITED_MS) if chunk else (planner.limits.max_step_tokens, self.max_itl)
        planner.limits = structs.replace(planner.limits, prefill_chunk=longest, max_itl=max_itl)
        alone = [self.tick() for _ in range(ALONE)]
        loaded, ttft = [], []
        for _ in range(PROMPTS):
            started, key = time.perf_counter(), self.submit(self.prompt, 1)
            while key not in self.mailbox.outcomes:
                loaded.append(self.tick())
            ttft.append((time.perf_counter() - started) * 1e3)
        return Figures(
            rows, chunk, distribution(alone, 1e3), distribution(loaded, 1e3), sorted(ttft)[PROMPTS // 2], self.ceiling()
        )

    def ceiling(self) -> float:
        """Return the lower bound of a prompt's time in milliseconds.

        Counts every weight except the embedding for each token, and attention to all previous tokens.
        """
        model: ModelConfig = self.engine.runtime.model.config  # type: ignore[attr-defined]
        width = model.heads * model.head_dim
        layer = model.hidden_size * (2 * width + 2 * model.kv_heads * model.head_dim + 3 * model.intermediate_size)
        work = 2 * self.prompt * model.layers * layer + 2 * model.layers * width * self.prompt**2
        return work / FLOPS * 1e3


HEAD = "rows  chunk  alone p50   chunk p50    p99   x p50   x p99  TTFT ms  ceiling"


def line(f: Figures) -> str:
    times = f"{f.alone['p50']:>10.3f} {f.with_chunk['p50']:>11.3f} {f.with_chunk['p99']:>6.3f}"
    return (
        f"{f.rows:>4} {f.chunk:>6} {times} {f.over('p50'):>7.2f} {f.over('p99'):>7.2f} {f.ttft:>8.1f} {f.ceiling:>8.1f}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 1024, 512, 256, 128, 64, 0])
    parser.add_argument("--max-itl", type=float, metavar="MS", help="limit of chunk 0 (default: that of the engine)")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens (default 8192)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    chunks = [chunk or MIN_CHUNK for chunk in arguments.chunks]
    steps = SETTLED + sum(ALONE + PROMPTS * (arguments.prompt // chunk + 10) for chunk in chunks)
    size = (max(arguments.rows), max(*chunks, LARGEST_STEP), arguments.prompt, 2 * steps)
    bench = Bench(arguments.shape, arguments.device, *size, arguments.max_itl)
    print(HEAD, flush=True)
    found = []
    for rows in arguments.rows:
        for figures in bench.run(rows, arguments.chunks):
            found.append(asdict(figures) | {"over_p50": figures.over("p50"), "over_p99": figures.over("p99")})
            print(line(figures), flush=True)
    if arguments.save:
        config = {name: vars(arguments)[name] for name in ("prompt", "device", "max_itl")}
        config["shape"] = arguments.shape.name
        if arguments.device == "cuda":
            config["gpu"] = torch.cuda.get_device_name()
        print(save(arguments.save, config, {"steps": found}))


if __name__ == "__main__":
    main()
