"""Time GPU work in CUDA graphs, without launch overhead."""

import statistics
from collections.abc import Callable, Sequence

import torch

WARMUP_REPLAYS = 3


def graph_seconds(work: Callable[[], object], replays: int = 20) -> float:
    """Capture `work` in a CUDA graph and return the median seconds of one replay.

    `work` runs once before the capture, to compile kernels and allocate buffers; the first WARMUP_REPLAYS replays are
    discarded. Each replay is timed using its own pair of events, on an idle device.
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


def graph_microseconds(launches: Sequence[Callable[[], object]]) -> float:
    """Capture all launches in one CUDA graph and return the median microseconds per launch."""

    def launch_all() -> None:
        for launch in launches:
            launch()

    return graph_seconds(launch_all) * 1e6 / len(launches)


def new_event() -> torch.cuda.Event:
    """Create an event with timing enabled."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
