"""Decode steps as CUDA graphs: a slot's inputs lie at fixed places, and the CPU only fills and replays.

A step of n rows takes the graph of the next larger row count, its bucket; rows beyond n are padding: row 0, position
0, page 0. The forward pass and the three ways of sampling are captured apart and replayed one after the other, so
their number is a sum, not a product. All graphs share one memory pool: they run one at a time, in stream order (I1).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_core.plan import StepPlan
from engine_core.runtime.captured import CapturedStep
from engine_core.runtime.slots import StepSlot
from engine_core.runtime.staging import Ints, Packed
from engine_core.runtime.tables import Mode

Forward = Callable[[Tensor, Tensor], Tensor]
"""(rows [B] int32, positions [B] int32) -> logits [B, V]."""
Sampling = Callable[[Mode, Tensor, Tensor, Tensor, Tensor], None]
"""(mode, logits, rows, positions, out [B] int32)."""


class DecodeGraphs:
    """Captured steps by slot and bucket."""

    def __init__(self, buckets: tuple[int, ...], steps: list[dict[int, CapturedStep]]) -> None:
        """buckets: ascending; steps: one dictionary a slot."""
        self.buckets = buckets
        self.steps = steps

    def bucket(self, plan: StepPlan) -> int | None:
        """The bucket that a step fits, or None: it brings news, holds more than single tokens, or is too large."""
        if not plan.plain:
            return None
        return next((bucket for bucket in self.buckets if bucket >= len(plan.rows)), None)


def pack_decode(plan: StepPlan, bucket: int, out: Ints) -> Packed:
    """Writes a plain plan where its bucket's graphs read it: rows, then positions, each padded with zeros."""
    count = len(plan.rows)
    rows = np.array([r.row for r in plan.rows], dtype=np.int32)
    positions = np.array([r.start for r in plan.rows], dtype=np.int32)
    out[:count] = rows
    out[count:bucket] = 0
    out[bucket : bucket + count] = positions
    out[bucket + count : 2 * bucket] = 0
    fields = {"rows": (0, bucket), "positions": (bucket, bucket)}
    return Packed(fields, 2 * bucket, rows, int(positions.max()) + 1)


def capture(
    buckets: tuple[int, ...],
    slots: list[StepSlot],
    forward: Forward,
    sampling: Sampling,
    progress: Callable[[int], None],
) -> DecodeGraphs:
    """Captures every slot's graphs, the largest bucket first, so that the smaller ones reuse its memory.

    Every path runs once before it is captured: kernels are compiled and scratch memory is allocated by that. The
    inputs are padding meanwhile. progress: called with a percentage.
    """
    pool = torch.cuda.graph_pool_handle()
    steps: list[dict[int, CapturedStep]] = [{} for _ in slots]
    for done, bucket in enumerate(reversed(buckets)):
        for slot, captured in zip(slots, steps, strict=True):
            rows, positions = slot.device_inputs[:bucket], slot.device_inputs[bucket : 2 * bucket]
            out = slot.sampled[:bucket]
            if slot is slots[0]:
                logits = forward(rows, positions)
                for mode in Mode:
                    sampling(mode, logits, rows, positions, out)
                torch.cuda.current_stream().synchronize()
            captured[bucket] = _capture_step(pool, rows, positions, out, forward, sampling)
        progress(100 * (done + 1) // len(buckets))
    return DecodeGraphs(buckets, steps)


def _capture_step(
    pool: Any, rows: Tensor, positions: Tensor, out: Tensor, forward: Forward, sampling: Sampling
) -> CapturedStep:
    graph, logits = _record(pool, lambda: forward(rows, positions))
    assert logits is not None
    ways = {}
    for mode in Mode:
        ways[mode], _ = _record(pool, lambda mode=mode: sampling(mode, logits, rows, positions, out))  # type: ignore[misc]
    return CapturedStep(graph, logits, ways)


def _record(pool: Any, work: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
    """`torch.cuda.graph` would collect garbage and empty caches at each of some hundred captures."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    result = work()
    graph.capture_end()
    return graph, result
