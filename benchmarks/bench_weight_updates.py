"""Seconds to update the weights of a server from a trainer on another GPU, and what a killed trainer leaves.

    python -m benchmarks.bench_weight_updates --shape benchmarks/shapes/llama-3.1-8b [--updates 8] [--out FILE]
    python -m benchmarks.bench_weight_updates --device cpu

`tandem serve` with random weights runs on the first GPU, a trainer's process on the second. They join a group through
NCCL as vLLM's trainers do, and each update broadcasts all weights of one of two seeds in packed buffers. Reported are
the seconds of /update_weights, which has the transfer, and of /finish_weight_update. The median leaves out the first
update, which allocates buffers. Then a trainer is killed in the middle of a broadcast: the update has to fail with 409,
after at most --update-timeout if NCCL does not notice, and requests with 503 until a full update. The exit code is 1 if
a check fails.

With --device cpu they use gloo and, without --shape, the default model.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.results import write
from benchmarks.shapes.make_folder import make_folder
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tests.support.nccl_trainer import ANY_HOST
from tests.support.served_trainer import ServedTrainer, visible_gpus
from tests.support.serving import Serving, until, write_console_script
from tests.support.trainer_weights import num_bytes, update_info

GB = 10**9
QUESTION = {"prompt": [1, 5, 9, 200, 30], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
SEEDS = (1, 2)
READY_SECONDS = 600.0
"""Longest wait for the server, which compiles kernels if its Triton cache is cold."""
BUFFER_BYTES = 2**30
"""Size of buffers, as of vLLM's trainers; less for small models, so that a trainer can be killed between two."""
MIN_BUFFERS = 8
FLAGS = {
    "cuda": "--max-rows 16 --max-len 2048 --kv-tokens 65536 --graph-rows 1,8,16 --graph-tokens 256,512 "
    f"--speculate off --weight-update-hosts {ANY_HOST}",
    "cpu": "--max-rows 4 --max-len 256 --kv-tokens 2000 --threads 1",
}


class UpdateBench:
    """A server, and the trainers that join it one after the other."""

    def __init__(self, serving: Serving, folder: Path, device: str) -> None:
        self._serving = serving
        self._folder = folder
        self._device = device
        self._answers: dict[int, list[int]] = {}
        """Token ids of the answer under the weights of each seed."""
        self.checks: dict[str, bool] = {}
        self.joins: list[float] = []
        self.updates: list[dict[str, float]] = []
        self.num_bytes = num_bytes(update_info(folder))
        self.buffer_bytes = min(BUFFER_BYTES, self.num_bytes // MIN_BUFFERS)
        self.refused_after = 0.0

    def measure(self, updates: int) -> None:
        """Update with the two seeds alternately, kill the trainer, and update again from another."""
        repeats = True
        with self._trainer() as trainer:
            self.joins.append(trainer.join_seconds)
            for number in range(updates):
                seed = SEEDS[number % len(SEEDS)]
                update, finish = trainer.update(seed)
                self.updates.append({"update_seconds": update, "finish_seconds": finish})
                found = self._answer()
                repeats &= self._answers.setdefault(seed, found) == found
            self._check("the same weights give the same answer", repeats)
            self._check("other weights give another", self._answers[SEEDS[0]] != self._answers[SEEDS[1]])
            self.refused_after, statuses = trainer.die_in_update(SEEDS[1])
        self._check("a killed trainer: 409 for the update and its finish", statuses == [409, 409])
        self._check("requests after it: 503", self._status() == 503)
        with self._trainer() as trainer:
            self.joins.append(trainer.join_seconds)
            trainer.update(SEEDS[0])
            self._check("a full update completes the weights", self._answer() == self._answers[SEEDS[0]])

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": self.num_bytes,
            "join_seconds": self.joins,
            "updates": self.updates,
            **medians(self.updates),
            "killed_trainer_refused_after_seconds": self.refused_after,
            "checks": self.checks,
        }

    def _trainer(self) -> ServedTrainer:
        environment = {"CUDA_VISIBLE_DEVICES": visible_gpus()[1]} if self._device == "cuda" else {}
        return ServedTrainer(self._serving, self._folder, self._device, self.buffer_bytes, environment)

    def _check(self, name: str, is_right: bool) -> None:
        print(f"{name}: {'yes' if is_right else 'NO'}", flush=True)
        self.checks[name] = is_right

    def _answer(self) -> list[int]:
        status, found = self._serving.post("/v1/completions", QUESTION | {"return_token_ids": True})
        if status != 200:
            raise RuntimeError(f"the server answers {status}: {found}")
        tokens: list[int] = found["choices"][0]["token_ids"]
        return tokens

    def _status(self) -> int:
        return self._serving.post("/v1/completions", QUESTION)[0]


def medians(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of the figures of all updates but the first."""
    return {f"median_{name}": statistics.median(update[name] for update in updates[1:]) for name in updates[0]}


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    update, count = figures["median_update_seconds"], len(figures["updates"]) - 1
    return [
        f"join: {', '.join(f'{seconds:.2f} s' for seconds in figures['join_seconds'])}",
        f"/update_weights: {update:.3f} s, {figures['bytes'] / GB:.2f} GB, {figures['bytes'] / update / GB:.1f} GB/s "
        f"(median of {count}; the first {figures['updates'][0]['update_seconds']:.3f} s)",
        f"/finish_weight_update: {figures['median_finish_seconds']:.3f} s",
        f"a killed trainer: refused after {figures['killed_trainer_refused_after_seconds']:.1f} s",
    ]


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, help="directory with a config.json (default: the default model)")
    parser.add_argument("--updates", type=int, default=8, help="updates to time, at least 3 (default: 8)")
    parser.add_argument("--update-timeout", type=float, help="of the server, in seconds (default: 20, on a cpu 100)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to this JSON file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, and return 1 if a check fails."""
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    device = arguments.device
    if arguments.updates < 3:
        parser.error(f"--updates {arguments.updates}: give at least 3, two for the two seeds and one that repeats")
    if device == "cuda" and len(visible_gpus()) < 2:
        parser.error(f"needs two GPUs of one host, found {len(visible_gpus())}; --device cpu uses gloo without any")
    timeout = {"cuda": 20.0, "cpu": 100.0}[device] if arguments.update_timeout is None else arguments.update_timeout
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-")))
        folder, flags = DEFAULT_MODEL, ["--device", device, *FLAGS[device].split()]
        if arguments.shape is not None:
            folder = work / arguments.shape.name
            make_folder(arguments.shape, folder)
            flags += ["--load-format", "dummy"]
        flags += ["--model", str(folder), "--enable-weight-updates", "--update-timeout", str(timeout)]
        environment = {"CUDA_VISIBLE_DEVICES": visible_gpus()[0]} if device == "cuda" else {}
        script = write_console_script(work)
        serving = Serving(work / "log", *flags, tandem=script, wait=False, environment=environment)
        stack.enter_context(serving)
        until(serving.ready, "readiness", READY_SECONDS)
        bench = UpdateBench(serving, folder, device)
        bench.measure(arguments.updates)
    figures = bench.figures()
    print("\n".join(lines(figures)), flush=True)
    if arguments.out is not None:
        config = {"shape": (arguments.shape or DEFAULT_MODEL).name, "device": device, "flags": FLAGS[device]}
        config |= {"updates": arguments.updates, "update_timeout": timeout, "buffer_bytes": bench.buffer_bytes}
        if device == "cuda":
            config["gpu"] = torch.cuda.get_device_name()
        print(write(arguments.out, config, figures))
    return int(not all(bench.checks.values()))


if __name__ == "__main__":
    sys.exit(main())
