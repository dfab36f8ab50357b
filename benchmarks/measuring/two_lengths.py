"""Compare the decode steps of two engines that differ in `max_len`.

Engines timed one after the other differ by more than a longer context costs. So both run the same prompts, and short
windows of steps alternate between them.
"""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine

PROMPT = 448
SETTLE, WINDOW, WINDOWS = 4, 32, 12
"""Untimed steps before each window, timed steps of a window, and windows per engine."""
MIN_LEN = PROMPT + 1 + WINDOWS * (SETTLE + WINDOW) + 8
"""Positions that a row needs, the minimum of `max_len`."""
KINDS = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
}
"""Sampling parameters of all rows, by name."""


class Loss(Struct):
    """Milliseconds per step in both engines, and the slowdown of the second."""

    kind: str
    rows: int
    steps: tuple[float, float]
    """Medians over the windows."""
    gpu: tuple[float, float]
    """Device time of a step; 0 on a CPU."""
    loss_percent: float
    """Median over pairs of consecutive windows."""
    gpu_loss_percent: float
    """The same for device time; 0 on a CPU."""


class Times(Struct):
    """Mean times of a window's steps, in seconds."""

    step: float
    gpu: float


def build(
    folder: Path, lengths: Sequence[int], max_rows: int, quantize: str, device: str = "cuda"
) -> tuple[DrivenEngine, DrivenEngine]:
    """Build two engines that differ only in `max_len`."""
    options = EngineOptions(
        model=str(folder),
        load_format="dummy",
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        quantize="fp8" if quantize == "fp8" else "off",
        max_rows=max_rows,
        kv_tokens=max(max_rows * MIN_LEN, *lengths),
    )
    first, second = (DrivenEngine.build(structs.replace(options, max_len=length)) for length in lengths)
    return first, second


def fill(driven: DrivenEngine, rows: int, params: dict[str, float], prompt: int, tokens: int) -> None:
    """Submit rows of random prompts, and run until all decode."""
    rng = random.Random(rows)
    vocab_size = driven.engine.control.model.vocab_size
    wanted = SamplingParams(tokens, ignore_eos=True, **params)
    ids = [driven.submit(rng.choices(range(vocab_size), k=prompt), wanted) for _ in range(rows)]
    while not all(driven.tokens(request_id) for request_id in ids):
        driven.engine.tick()


def empty(driven: DrivenEngine) -> None:
    """Run until every request has finished."""
    while driven.engine.scheduler.num_open or driven.engine.pipeline.in_flight:
        driven.engine.tick()


def time_window(driven: DrivenEngine, settle: int, steps: int) -> Times:
    """Time a window of steps after some untimed ones."""
    engine = driven.engine
    tick_steps(driven, settle)
    times = engine.runtime.device_times()
    busy, timed, committed, start = times.busy, times.steps, engine.stats.steps_committed, time.perf_counter()
    tick_steps(driven, steps)
    seconds = time.perf_counter() - start
    times = engine.runtime.device_times()
    return Times(
        seconds / (engine.stats.steps_committed - committed), (times.busy - busy) / max(1, times.steps - timed)
    )


def tick_steps(driven: DrivenEngine, count: int) -> None:
    """Tick until the engine has committed this many more steps."""
    stats = driven.engine.stats
    target = stats.steps_committed + count
    while stats.steps_committed < target:
        driven.engine.tick()


def compare(
    engines: tuple[DrivenEngine, DrivenEngine],
    rows: int,
    kind: str,
    prompt: int = PROMPT,
    settle: int = SETTLE,
    window: int = WINDOW,
    windows: int = WINDOWS,
) -> Loss:
    """Time steps of the same rows alternately in two engines.

    Consecutive windows form a pair; every other pair starts with the second engine.
    """
    tokens = 1 + windows * (settle + window) + 8
    for driven in engines:
        fill(driven, rows, KINDS[kind], prompt, tokens)
    pairs: list[tuple[Times, Times]] = []
    for number in range(windows):
        if number % 2:
            second = time_window(engines[1], settle, window)
            pairs.append((time_window(engines[0], settle, window), second))
        else:
            first = time_window(engines[0], settle, window)
            pairs.append((first, time_window(engines[1], settle, window)))
    for driven in engines:
        empty(driven)
    return loss_of(kind, rows, pairs)


def loss_of(kind: str, rows: int, pairs: Sequence[tuple[Times, Times]]) -> Loss:
    """Compute the medians of the windows and of the slowdowns of their pairs."""
    steps = [statistics.median(pair[engine].step for pair in pairs) * 1e3 for engine in (0, 1)]
    gpu = [statistics.median(pair[engine].gpu for pair in pairs) * 1e3 for engine in (0, 1)]
    return Loss(
        kind,
        rows,
        steps=(steps[0], steps[1]),
        gpu=(gpu[0], gpu[1]),
        loss_percent=statistics.median(100 * (second.step / first.step - 1) for first, second in pairs),
        gpu_loss_percent=statistics.median(
            100 * (second.gpu / first.gpu - 1) if first.gpu else 0.0 for first, second in pairs
        ),
    )


def line(lengths: Sequence[int], loss: Loss) -> str:
    """Format a slowdown as one line."""
    (short, long), (gpu_short, gpu_long) = loss.steps, loss.gpu
    return (
        f"{loss.kind:>10} {loss.rows:>4} rows: {short:.4f} ms with max_len {lengths[0]}, {long:.4f} with {lengths[1]}, "
        f"loss {loss.loss_percent:+.2f} %; GPU {gpu_short:.4f}, {gpu_long:.4f}, loss {loss.gpu_loss_percent:+.2f} %"
    )
