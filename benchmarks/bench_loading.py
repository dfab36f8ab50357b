"""Loading of weights and time to ready, against the bandwidth of the machine.

    python -m benchmarks.bench_loading --shape benchmarks/shapes/llama-3.1-8b [--folder DIR] [--save NAME]

Writes a checkpoint of noise in the shape (or uses --folder), which stays in the page cache. Measures, in GB/s, reading
its files using several numbers of threads, and copies of pinned memory to the device. Then, in separate processes, the
engine's loader for several numbers of threads (best of three) with the peak of anonymous memory above the idle process,
and the safetensors library, one tensor at a time. Finally the seconds from `tandem serve` to ready, with a cold and a
warm Triton cache; --warm-cache names a filled cache and skips the cold start.

Limits: loading takes 1.2 times the checkpoint's bytes over the copy bandwidth, and 2 GiB of memory; a server with a
warm cache is ready 15 s after that.
"""

import argparse
import gc
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.matrix.server import Server
from benchmarks.measuring.host_memory import PeakMemory
from benchmarks.measuring.results import save
from benchmarks.shapes.make_checkpoint import write_checkpoint
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.weights import load_weights
from tandem.engine_core.models.registry import Model, build_model, open_checkpoint, read_config
from tandem.engine_core.startup.device import open_parts

MB = 10**6
GB = 10**9
READ_BYTES = 2**24
COPIED_BYTES, COPIES = 2**28, 16
REPEATS = 3
SLACK, READY_SECONDS = 1.2, 15.0
STAGE = re.compile(r"start: (.+) took (\d+\.\d+) s")


def read_bandwidth(files: list[Path], threads: int) -> float:
    """Measure the bandwidth of reading files in bytes/s, with a buffer per thread."""
    blocks = [(path, start) for path in files for start in range(0, path.stat().st_size, READ_BYTES)]
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    total = [0] * threads

    def work(number: int) -> None:
        buffer = bytearray(READ_BYTES)
        for path, start in blocks[number::threads]:
            total[number] += os.preadv(descriptors[path], [buffer], start)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    for descriptor in descriptors.values():
        os.close(descriptor)
    return sum(total) / seconds


def copy_bandwidth(device: str) -> float:
    """Measure the bandwidth of copies from (pinned) host memory to the device, in bytes/s."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, COPIES * COPIED_BYTES / (time.perf_counter() - started))
    return best


def touched_model(folder: Path, device: str, dtype: str) -> tuple[Model, Checkpoint, float]:
    """Build the model with resident memory; return it with its checkpoint and the seconds."""
    started = time.perf_counter()
    config = read_config(folder)
    checkpoint = open_checkpoint(folder, config)
    context = open_parts(device).build_context(config, getattr(torch, dtype))
    model = build_model(config, context, None, checkpoint)
    for slot in model.weight_slots():
        slot.target.zero_()
    if device == "cuda":
        torch.cuda.synchronize()
    return model, checkpoint, time.perf_counter() - started


def measure_loads(folder: Path, device: str, dtype: str, threads: list[int]) -> dict[str, Any]:
    """Load the checkpoint using the engine's loader: first measure memory, then time per number of threads."""
    model, checkpoint, build_seconds = touched_model(folder, device, dtype)
    gc.collect()
    with PeakMemory() as memory:
        load_weights(model, checkpoint)

    def seconds(count: int | None) -> float:
        started = time.perf_counter()
        load_weights(model, checkpoint, threads=count)
        return time.perf_counter() - started

    return {
        "build_seconds": build_seconds,
        "memory_growth": memory.growth,
        "idle_memory": memory.idle,
        "seconds": min(seconds(None) for _ in range(REPEATS)),
        "seconds_by_threads": {str(count): min(seconds(count) for _ in range(REPEATS)) for count in threads},
    }


def measure_library(folder: Path, device: str, dtype: str) -> dict[str, Any]:
    """Load the checkpoint with the safetensors library, one tensor at a time."""
    model, _, _ = touched_model(folder, device, dtype)
    slots = {slot.name: slot for slot in model.weight_slots()}
    with PeakMemory() as memory:
        started = time.perf_counter()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
                    slots[name].target.copy_(file.get_tensor(name))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "memory_growth": memory.growth}


def measure_ready(folder: Path, device: str, dtype: str, cache: Path, log: Path) -> dict[str, Any]:
    """Start `tandem serve` and wait until it is ready.

    Return the total seconds, and those of the stages in the engine's log.
    """
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    flags = ["--model", str(folder), "--device", device, "--dtype", dtype, "--max-len", "4096"]
    with Server(flags, log) as server:
        ready = server.ready_seconds
    return {"seconds": ready, "stages": {name: float(took) for name, took in STAGE.findall(log.read_text())}}


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(folder: Path, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, and print figures as they are measured."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    device, dtype = arguments.device, arguments.dtype
    read_bandwidth(files, max(arguments.threads))  # into the page cache
    reads = {str(count): read_bandwidth(files, count) for count in arguments.threads}
    print("read, GB/s by threads:", {count: round(rate / GB, 1) for count, rate in reads.items()}, flush=True)
    copies = in_process(copy_bandwidth, device)
    ceiling = SLACK * size / copies
    print(f"copies to {device}: {copies / GB:.1f} GB/s; {size / GB:.2f} GB: at most {ceiling:.2f} s", flush=True)
    loads = in_process(measure_loads, folder, device, dtype, arguments.threads)
    print(f"load: {line(loads, size, ceiling)}; by threads:", end=" ")
    print({count: round(seconds, 2) for count, seconds in loads["seconds_by_threads"].items()}, flush=True)
    library = in_process(measure_library, folder, device, dtype)
    print(f"safetensors, one tensor after the other: {line(library, size, ceiling)}", flush=True)
    figures = {"bytes": size, "read_bandwidth": reads, "copy_bandwidth": copies, "ceiling_seconds": ceiling}
    figures |= {"load": loads, "load_over_ceiling": loads["seconds"] / ceiling, "library": library}
    if not arguments.no_serve:
        figures["ready_ceiling_seconds"] = ceiling + READY_SECONDS
        cache = arguments.warm_cache or work / "triton"
        for state in ("warm",) if arguments.warm_cache else ("cold", "warm"):
            found = measure_ready(folder, device, dtype, cache, work / f"{state}.log")
            print(f"ready, Triton cache {state}: {found['seconds']:.1f} s {found['stages']}", flush=True)
            figures[f"ready_{state}"] = found
    return figures


def line(figures: dict[str, Any], size: int, ceiling: float) -> str:
    seconds, growth = figures["seconds"], figures["memory_growth"]
    rate = f"{seconds:.2f} s, {size / seconds / GB:.1f} GB/s, {seconds / ceiling:.2f} x ceiling"
    return f"{rate}, {growth / MB:.0f} MB of anonymous memory above idle"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--folder", type=Path, help="model folder with weights, to use instead of noise")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--no-serve", action="store_true", help="leave out the time to ready")
    parser.add_argument("--warm-cache", type=Path, metavar="DIR", help="warm Triton cache, such as ~/.triton/cache")
    parser.add_argument("--work", type=Path, help="directory for checkpoint and caches (default: that of tempfile)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as directory:
        work, folder = Path(directory), arguments.folder
        if folder is None:
            folder = work / arguments.shape.name
            started = time.perf_counter()
            size = write_checkpoint(arguments.shape, folder)
            print(
                f"{arguments.shape.name}: wrote {size / GB:.2f} GB in {time.perf_counter() - started:.1f} s", flush=True
            )
        figures = measure(folder, work, arguments)
    if arguments.save:
        config = {"shape": arguments.shape.name, "device": arguments.device, "dtype": arguments.dtype}
        if arguments.device == "cuda":
            config["gpu"] = torch.cuda.get_device_name()
        print(save(arguments.save, config | {"cores": len(os.sched_getaffinity(0))}, figures))


if __name__ == "__main__":
    main()
