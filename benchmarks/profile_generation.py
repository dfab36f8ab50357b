"""Profile the steps of an engine: Chrome traces, time by operation and by kernel.

    python -m benchmarks.profile_generation --model FOLDER [--rows 8] [--phase prompt]
    python -m benchmarks.profile_generation --model benchmarks/shapes/llama-3.2-1b --dummy

Operations (norm, qkv, RoPE with the KV write, attention and its output projection, mlp, embedding, head, sampling) are
those of eager steps, since CUDA graphs replay without the Python that names them. On a GPU their times are of the
kernels they launch; a norm fused with the next projection counts as qkv or mlp. The table of kernels is for steps as
served, using graphs where the engine has them. On a CPU both tables are for the same steps, with torch operators
instead of kernels.

Two traces are written to --out: `operations.json.gz` and, with graphs, `steps.json.gz`; open them in
https://ui.perfetto.dev or chrome://tracing.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.porting.local_engine import LocalEngine
from benchmarks.porting.scopes import PREFIX, STEP, scoped
from benchmarks.porting.trace import Totals, kernels, operations, read_trace
from tandem.engine_core.errors import ConfigError
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams

WARM_STEPS = 4
"""Warm-up steps."""
MAX_NAME = 60
"""Printed characters of a kernel's name."""


class Workload:
    """Requests on an engine with profiled steps."""

    def __init__(self, engine: LocalEngine, arguments: argparse.Namespace) -> None:
        self.engine = engine
        self._rows, self._prompt = arguments.rows, arguments.prompt
        self._phase, self._steps = arguments.phase, arguments.steps
        sampled = {"temperature": 0.8, "top_p": 0.95} if arguments.sample else {"temperature": 0.0}
        tokens = 1 if self._phase == "prompt" else WARM_STEPS + self._steps + 4
        self._params = SamplingParams(tokens, ignore_eos=True, seed=1, **sampled)
        self._rng = random.Random(0)

    def run(self, trace: Path) -> tuple[int, float]:
        """Profile steps and write their trace.

        Return their number and total seconds.
        """
        keys = self._submit()
        received = self.engine.mailbox.received
        if self._phase == "decode":
            while min(len(received[key]) for key in keys) < WARM_STEPS:
                self.engine.engine.tick()
        engine = self.engine.engine
        with profiled(trace):
            first, started = engine.stats.steps_committed, time.perf_counter()
            while self._goes_on(keys, engine.stats.steps_committed - first):
                with record_function(PREFIX + STEP):
                    engine.tick()
            self.engine.runtime.synchronize()
            steps, seconds = engine.stats.steps_committed - first, time.perf_counter() - started
        while any(key not in self.engine.mailbox.outcomes for key in keys):
            self.engine.engine.tick()
        return steps, seconds

    def _goes_on(self, keys: list[tuple[bytes, int]], steps: int) -> bool:
        if self._phase == "decode":
            return steps < self._steps
        return any(not self.engine.mailbox.received[key] for key in keys)

    def _submit(self) -> list[tuple[bytes, int]]:
        vocab = self.engine.runtime.model.config.vocab_size
        prompts = [[self._rng.randrange(vocab) for _ in range(self._prompt)] for _ in range(self._rows)]
        return self.engine.submit(prompts, self._params)


@contextmanager
def profiled(trace: Path) -> Iterator[None]:
    """Context manager that writes a Chrome trace."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, acc_events=True) as found:
        yield
    found.export_chrome_trace(str(trace))


def table(title: str, totals: Totals, steps: int, most: int | None = None) -> str:
    """Format times per step with their shares, the longest first."""
    everything = sum(total.microseconds for total in totals.values()) or 1.0
    lines = [f"{title:<{MAX_NAME}} {'ms/step':>9} {'share':>7} {'calls/step':>11}"]
    for name, total in list(totals.items())[:most]:
        short = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
        share, calls = 100 * total.microseconds / everything, total.count / steps
        lines.append(f"{short:<{MAX_NAME}} {total.microseconds / 1000 / steps:>9.3f} {share:>6.1f}% {calls:>11.1f}")
    if most is not None and len(totals) > most:
        lines.append(f"and {len(totals) - most} more")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="model folder")
    parser.add_argument("--dummy", action="store_true", help="random weights; the folder needs only a config.json")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--phase", default="decode", choices=("decode", "prompt"), help="steps to profile")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="sequences at once (default: 8)")
    parser.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt (default: 256)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="decode steps to profile (default: 20)")
    parser.add_argument("--sample", action="store_true", help="temperature 0.8 and top-p 0.95 instead of greedy")
    parser.add_argument("--kernels", type=int, default=15, metavar="N", help="kernels to print (default: 15)")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="directory of the traces (default: profile)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    positions = arguments.prompt + arguments.steps + WARM_STEPS + 8
    options = EngineOptions(
        model=str(arguments.model),
        load_format="dummy" if arguments.dummy else "auto",
        device=arguments.device,
        dtype=arguments.dtype,
        max_rows=arguments.rows,
        max_len=positions,
        kv_tokens=arguments.rows * (positions + 64),
        prefix_cache="off",
    )
    try:
        workload = Workload(LocalEngine.open(options), arguments)
    except ConfigError as error:
        print(f"profile_generation: {error}", file=sys.stderr)
        sys.exit(2)
    runtime = workload.engine.runtime
    graphs, runtime.graphs = runtime.graphs, None
    trace = arguments.out / "operations.json.gz"
    with scoped(runtime):
        steps, seconds = workload.run(trace)
    kind = runtime.device.torch_device.type
    what = f"{arguments.phase} steps of {arguments.rows} rows on {kind}, prompts of {arguments.prompt} tokens"
    print(f"{steps} {what}: {1000 * seconds / steps:.2f} ms a step, eager, with the profiler")
    print(table("operation", operations(read_trace(trace)), steps))
    if graphs is not None:
        runtime.graphs = graphs
        trace = arguments.out / "steps.json.gz"
        steps, seconds = workload.run(trace)
        print(f"\n{steps} {what}: {1000 * seconds / steps:.2f} ms a step, as served, with the profiler")
    print()
    names = "kernel" if kind == "cuda" else "torch operator"
    print(table(names, kernels(read_trace(trace)), steps, arguments.kernels))
    print(f"\ntraces in {arguments.out}")


if __name__ == "__main__":
    main()
