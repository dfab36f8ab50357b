"""The measurement of the memory that steps and graphs will take of a device.

The KV pool gets the rest. Both are tried over a pool of one page: `warm_up` runs the largest possible step, and the
graphs of the largest shapes are captured and dropped.
"""

from collections.abc import Callable

from tandem.engine_core.config import StepConfig
from tandem.engine_core.contracts import Runtime
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.startup.warmup import warm_up


def measure_step_bytes(device: Device, runtime: Runtime, config: StepConfig) -> int:
    """Measure the bytes that the allocator holds for the largest step.

    These are activations, logits and unused parts of blocks.
    """
    device.release_unused()
    before = device.held_bytes()
    warm_up(runtime, config)
    return device.held_bytes() - before


def measure_graph_bytes(device: Device, config: StepConfig, trial: Callable[[int], object]) -> int:
    """Estimate the bytes of all decode graphs from the largest.

    There is a graph for each row count and slot.

    trial: captures the graphs of the largest row count the given number of times, and returns what holds them. The
    first brings the memory that all share, logits among it; a further one costs the driver's part, the same for every
    row count.
    """
    if not config.graph_rows:
        return 0
    # The code of kernels is loaded when they first run, and stays.
    _measure(device, trial, 1)
    first = _measure(device, trial, 1)
    further = max(0, _measure(device, trial, 2) - first)
    device.release_unused()
    captures = config.depth * len(config.graph_rows)
    return first + (captures - 1) * further


def measure_mixed_graph_bytes(device: Device, config: StepConfig, further: int, trial: Callable[[int], object]) -> int:
    """Estimate the bytes of the graphs of mixed steps, beside the decode graphs.

    trial: captures the given number (0 to 2) of the largest shapes of one token count, beside the largest decode step.
    The first brings what all share, a further one costs the driver's part. further: bytes that the attention of all
    graphs holds beyond that of the largest token count in one slot.
    """
    if not config.graph_rows or not config.graph_tokens:
        return 0
    _measure(device, trial, 1)
    without, first = _measure(device, trial, 0), _measure(device, trial, 1)
    captures = config.depth * sum(len(config.mixed_rows(tokens)) for tokens in config.graph_tokens)
    driver = max(0, _measure(device, trial, 2) - first) if len(config.mixed_graph_rows) > 1 else 0
    device.release_unused()
    return max(0, first - without) + (captures - 1) * driver + further


def _measure(device: Device, trial: Callable[[int], object], count: int) -> int:
    device.release_unused()
    before = device.free_bytes()
    captured = trial(count)
    after = device.free_bytes()
    del captured
    return before - after
