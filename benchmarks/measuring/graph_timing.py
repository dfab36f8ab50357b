"""Timing of GPU work in a CUDA graph, without the cost of separate launches."""

import statistics
from collections.abc import Callable

import torch

WARMUP_REPLAYS = 3


def graph_seconds(work: Callable[[], object], replays: int = 20) -> float:
    """Capture `work` in a CUDA graph and return the median seconds of one replay.

    `work` runs once before the capture, so that kernels are compiled and buffers allocated, and WARMUP_REPLAYS replays
    are not counted. Each replay is timed by its own pair of events, with the device idle before it.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(WARMUP_REPLAYS + replays):
        start, end = new_event(), new_event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[WARMUP_REPLAYS:])


def new_event() -> torch.cuda.Event:
    """Create an event that records times."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
