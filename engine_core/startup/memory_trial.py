"""Measure the device memory of steps and graphs.

The KV pool gets the rest. Both are tried over a pool of one page: `warm_up` runs the largest possible step, and the
graphs of the largest shapes are captured and dropped.
"""

from collections.abc import Callable

from msgspec import Struct, structs

from tandem.engine_core.config import StepConfig
from tandem.engine_core.contracts import Runtime
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.startup.warmup import warm_up

Trial = Callable[[int], object]
"""Captures graphs for the given number of slots, and returns an object that keeps them alive."""

FURTHER_SLOTS = 2
"""Slots of a trial in addition to the first. The driver takes memory in pieces of some MiB: the part of one capture
is found by several."""
GRAPH_MARGIN = 0.1
"""Share of the estimate that is added to it: for the code of kernels that only smaller shapes run, and for the end of
the last piece of memory that the driver and the allocator have taken each."""


class GraphMemory(Struct, frozen=True):
    """Bytes of a trial's graphs."""

    held: int
    """Bytes that the allocator holds for them: buffers and activations. Graphs of smaller shapes lie in the same."""
    driver: int
    """Bytes of the device that the allocator does not hold: the graphs themselves, which share nothing, and
    everything allocated before."""


def measure_step_bytes(device: Device, runtime: Runtime, config: StepConfig) -> int:
    """Measure the bytes that the allocator holds for the largest step.

    These are activations, logits and unused parts of blocks.
    """
    device.release_unused()
    before = device.held_bytes()
    warm_up(runtime, config)
    return device.held_bytes() - before


def measure_graph_bytes(device: Device, config: StepConfig, further: int, decode: Trial, mixed: Trial) -> int:
    """Estimate the bytes of all graphs from the largest ones.

    further: bytes that the attention of all mixed graphs holds in addition to the largest token count in one slot.
    decode: captures the decode graph of the largest row count; mixed: captures that and the shapes of `mixed_trial`.
    """
    if not config.graph_rows:
        return 0
    held, each = _measure_slots(device, config, decode)
    driver = each * config.depth * _num_decode_graphs(config) // _num_decode_graphs(decode_trial(config))
    if config.graph_tokens:
        held, each_slot = _measure_slots(device, config, mixed)
        shapes = num_mixed_shapes(mixed_trial(config))
        driver += max(0, each_slot - each) * config.depth * num_mixed_shapes(config) // shapes
        held += further
    return int((held + driver) * (1 + GRAPH_MARGIN))


def decode_trial(config: StepConfig) -> StepConfig:
    """Return the settings of a trial of the largest decode graph alone."""
    prompts = config.draft_prompt_tokens[-1:]
    return structs.replace(config, graph_rows=config.graph_rows[-1:], graph_tokens=(), draft_prompt_tokens=prompts)


def mixed_trial(config: StepConfig) -> StepConfig:
    """Return the settings of a trial of the largest mixed and decode graphs.

    The mixed graphs are the largest without decode rows and with the most decode rows: the first needs the most memory
    for its positions, the second may for its logits.
    """
    beside_rows = [tokens for tokens in config.graph_tokens if len(config.mixed_rows(tokens)) > 1][-1:]
    rows = config.mixed_graph_rows
    return structs.replace(
        config,
        graph_rows=config.graph_rows[-1:],
        graph_tokens=tuple(sorted({*beside_rows, *config.graph_tokens[-1:]})),
        mixed_graph_rows=tuple(sorted({*rows[:1], *rows[-1:]})),
        draft_prompt_tokens=config.draft_prompt_tokens[-1:],
    )


def num_mixed_shapes(config: StepConfig) -> int:
    """Return the number of mixed graphs of a slot."""
    return sum(
        len(config.mixed_rows(tokens)) + len(config.adapted_mixed_rows(tokens)) for tokens in config.graph_tokens
    )


def _num_decode_graphs(config: StepConfig) -> int:
    """Return the number of forward passes of a slot that are captured without prompts."""
    plain = len(config.graph_rows) + len(config.verify_shapes)
    plain += 2 * len(config.draft_graph_rows)  # The first pass of a draft model, and the others.
    plain += len(config.draft_prompt_tokens)
    return plain + len(config.adapted_graph_rows) + len(config.adapted_verify_shapes)


def _measure_slots(device: Device, config: StepConfig, trial: Trial) -> tuple[int, int]:
    """Return the allocator's bytes for a trial in all slots, and the driver's in one."""
    # The code of kernels is loaded when they first run, and stays.
    _measure(device, trial, 1)
    one, more = _measure(device, trial, 1), _measure(device, trial, 1 + FURTHER_SLOTS)
    held = max(0, more.held - one.held) // FURTHER_SLOTS
    return one.held + (config.depth - 1) * held, max(0, more.driver - one.driver) // FURTHER_SLOTS


def _measure(device: Device, trial: Trial, slots: int) -> GraphMemory:
    """Measure the memory of the graphs of a trial, which are dropped.

    Memory that the allocator keeps from the warm-up runs before capture is not counted: eager steps reuse it. The
    driver's bytes are the total, since the driver may keep what an earlier trial took.
    """
    device.release_unused()
    before = device.held_bytes()
    captured = trial(slots)
    device.release_unused()
    held = device.held_bytes()
    driver = device.total_bytes() - device.free_bytes() - held
    del captured
    device.release_unused()
    return GraphMemory(held - before, driver)
