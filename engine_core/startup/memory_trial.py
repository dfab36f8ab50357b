"""What steps and graphs will take of a device's memory, measured before the KV pool gets the rest.

Both are tried for real over a pool of one page: `warm_up` holds the largest step that there can be, and the graphs of
the largest shapes are captured and dropped.
"""

from collections.abc import Callable

from tandem.engine_core.config import StepConfig
from tandem.engine_core.contracts import Runtime
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.startup.warmup import warm_up


def measure_step_bytes(device: Device, runtime: Runtime, config: StepConfig) -> int:
    """What the allocator has to hold for any step: activations, logits, and what its blocks waste."""
    device.release_unused()
    before = device.held_bytes()
    warm_up(runtime, config)
    return device.held_bytes() - before


def measure_graph_bytes(device: Device, config: StepConfig, row_bytes: int, trial: Callable[[int], object]) -> int:
    """What the decode graphs of all row counts and slots will take.

    trial: captures the graphs of the largest row count so many times over, and returns what holds them. The first of
    them brings the memory that all share; a further one costs the driver's part, the same for every row count, and
    its logits, row_bytes a row.
    """
    if not config.graph_rows:
        return 0
    # Code of kernels is loaded when they first run, and stays.
    _taken(device, trial, 1)
    first = _taken(device, trial, 1)
    further = max(0, _taken(device, trial, 2) - first)
    device.release_unused()
    driver = max(0, further - config.graph_rows[-1] * row_bytes)
    logits = config.depth * sum(config.graph_rows) * row_bytes
    captures = config.depth * len(config.graph_rows)
    return first + (captures - 1) * driver + logits - config.graph_rows[-1] * row_bytes


def measure_mixed_graph_bytes(device: Device, config: StepConfig, further: int, trial: Callable[[int], object]) -> int:
    """What the graphs of steps with prompts will take beside the decode graphs.

    trial: captures so many of the largest shapes of one token count, none to two, beside the largest decode step.
    The first brings what all share, a further one costs the driver's part. further: bytes that the attention of all
    graphs holds beyond that of the largest token count in one slot.
    """
    if not config.graph_rows or not config.graph_tokens:
        return 0
    _taken(device, trial, 1)
    without, first = _taken(device, trial, 0), _taken(device, trial, 1)
    captures = config.depth * len(config.graph_tokens) * len(config.mixed_graph_rows)
    driver = max(0, _taken(device, trial, 2) - first) if len(config.mixed_graph_rows) > 1 else 0
    device.release_unused()
    return max(0, first - without) + (captures - 1) * driver + further


def _taken(device: Device, trial: Callable[[int], object], count: int) -> int:
    device.release_unused()
    before = device.free_bytes()
    captured = trial(count)
    after = device.free_bytes()
    del captured
    return before - after
