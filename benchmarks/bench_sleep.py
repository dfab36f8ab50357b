"""Seconds to put an engine to sleep and to wake it, and the bytes that a sleep releases.

    python -m benchmarks.bench_sleep --shape benchmarks/shapes/llama-3.1-8b [--levels 1 2] [--rounds 3] [--out FILE]
    python -m benchmarks.bench_sleep --device cpu

An engine with random weights, `--enable-weight-updates` and `--sleep-reserve` runs in this process, without a wire. For
each level and round: the seconds until a sleep and a wake are answered, the bytes of weights and KV that were released,
on a GPU also by how much its free memory grew, and whether greedy outputs are those from before the first sleep.
Outputs are computed one at a time and with an empty prefix cache: in batches and after cached prefixes a GPU rounds
differently. The exit code is 1 if any output differs.

With --shape a wake from level 2 makes the random weights again, where a server reads its checkpoint. Without, it runs
the default model with its own weights.
"""

import argparse
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, to_builtins

from benchmarks.measuring.results import write
from tandem.engine_core.contracts import SleepMemory
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.commands import AnyCommand, Sleep, SleepTag, WakeUp
from tandem.protocol.params import SamplingParams
from tests.support.trained_engine import TrainedEngine

GB = 10**9
PROMPTS = [list(range(5 + number, 8 + number + 20 * number)) for number in range(3)]
GREEDY = SamplingParams(16, temperature=0.0, ignore_eos=True)
ON_GPU: dict[str, Any] = {
    "threads": None,
    "kv_tokens": None,
    "max_rows": 64,
    "max_len": 2048,
    "graph_rows": "1,8,64",
    "graph_tokens": "64,512",
}
"""Options on a GPU, in place of the small sizes of `TrainedEngine`."""


class Round(Struct):
    """Figures of one sleep and wake."""

    level: int
    round: int
    sleep_seconds: float
    wake_seconds: float
    released_bytes: int
    """Bytes of weights and KV that the engine released."""
    free_growth_bytes: int | None
    """Growth of the device's free memory; None on a CPU, where other processes change it."""
    outputs_equal: bool


class NotedMemory:
    """Implement `SleepMemory` with that of an engine, and note the bytes of its last release."""

    def __init__(self, memory: SleepMemory) -> None:
        self._memory = memory
        self.released = 0

    @property
    def has_folder(self) -> bool:
        return self._memory.has_folder

    def release(self, tags: Collection[SleepTag], keep_weights: bool) -> int:
        self.released = self._memory.release(tags, keep_weights)
        return self.released

    def restore(self, tags: Collection[SleepTag]) -> None:
        self._memory.restore(tags)

    def reload(self) -> bool:
        return self._memory.reload()


class SleepBench:
    """An engine, and its outputs before it slept."""

    def __init__(self, engine: TrainedEngine) -> None:
        self._engine = engine
        self._core = engine.driven.engine
        assert isinstance(self._core.runtime, TorchRuntime)
        self._device = self._core.runtime.device
        memory = self._core.control.sleep.memory
        assert memory is not None, "the engine was built without memory that sleeps"
        self._memory = self._core.control.sleep.memory = NotedMemory(memory)
        self._outputs()  # the first steps load and tune kernels
        self._before = self._outputs()
        self.repeats = self._outputs() == self._before
        """Whether outputs repeat without a sleep."""

    def measure(self, level: int, number: int) -> Round:
        """Sleep and wake once. Raises RuntimeError if the engine refuses."""
        free = self._device.free_bytes()
        asleep = self._seconds(lambda call: Sleep(call, level))
        growth = self._device.free_bytes() - free if self._device.kind == "cuda" else None
        awake = self._seconds(WakeUp)
        equal = self._outputs() == self._before
        return Round(level, number, asleep, awake, self._memory.released, growth, equal)

    def _outputs(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            self._core.scheduler.memory.reset_prefix_cache()
            found += self._engine.driven.generate([prompt], [GREEDY])
        return found

    def _seconds(self, command: Callable[[int], AnyCommand]) -> float:
        """Return the seconds until a command is answered."""
        started = time.perf_counter()
        answer = self._engine.call(command)
        seconds = time.perf_counter() - started
        if not answer.ok:
            raise RuntimeError(f"the engine refused: {answer.message}")
        return seconds


def build(shape: Path | None, device: str, gpu_memory: float) -> TrainedEngine:
    """Build an engine with random weights of a shape, or with the default model."""
    options: dict[str, Any] = {"sleep_reserve": True, "speculate": "off", "device": device}
    if shape is not None:
        options["load_format"] = "dummy"
    if device == "cuda":
        options |= ON_GPU | {"gpu_memory": gpu_memory}
    return TrainedEngine(shape or DEFAULT_MODEL, **options)


def line(found: Round) -> str:
    growth = "" if found.free_growth_bytes is None else f" ({found.free_growth_bytes / GB:.2f} GB more are free)"
    return (
        f"level {found.level}, round {found.round}: sleep {found.sleep_seconds:.3f} s, wake {found.wake_seconds:.3f} s,"
        f" {found.released_bytes / GB:.2f} GB released{growth}, outputs {'equal' if found.outputs_equal else 'DIFFER'}"
    )


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, help="directory with a config.json (default: the default model)")
    parser.add_argument("--levels", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="sleeps of each level, at least 1 (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpu-memory", type=float, default=0.9, metavar="SHARE", help="(default: 0.9)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to this JSON file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, and return 1 if outputs differ."""
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: give at least 1")
    bench = SleepBench(build(arguments.shape, arguments.device, arguments.gpu_memory))
    print(f"outputs repeat without a sleep: {bench.repeats}", flush=True)
    rounds = []
    for level in arguments.levels:
        for number in range(1, arguments.rounds + 1):
            rounds.append(bench.measure(level, number))
            print(line(rounds[-1]), flush=True)
    if arguments.out is not None:
        names = ("levels", "rounds", "device", "gpu_memory")
        config = {name: getattr(arguments, name) for name in names}
        config["shape"] = (arguments.shape or DEFAULT_MODEL).name
        if arguments.device == "cuda":
            config["gpu"] = torch.cuda.get_device_name()
        print(write(arguments.out, config, {"outputs_repeat": bench.repeats, "rounds": to_builtins(rounds)}))
    return int(not bench.repeats or not all(found.outputs_equal for found in rounds))


if __name__ == "__main__":
    sys.exit(main())
