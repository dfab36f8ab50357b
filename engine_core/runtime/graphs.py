"""Steps as CUDA graphs: a slot's inputs lie at fixed places, and the CPU only fills and replays.

A step takes the graph of the smallest shape that it fits; what it leaves free is padding: row 0, position 0, page 0.
Of a step of single tokens the forward pass and the ways of sampling are captured apart and replayed one after the
other, so their number is a sum, not a product. Of a step with prompts the forward pass is captured, as far as the
final hidden states. All graphs share one memory pool: they run one at a time, in stream order (I1).
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner, PromptStep
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import CapturedDecode, CapturedMixed, MixedBuffers
from tandem.engine_core.runtime.graph_bucket import GraphBucket, exact_bucket
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.tables import Mode

Forward = Callable[[Tensor, Tensor], Tensor]
"""(rows [B] int32, positions [B] int32) -> logits [B, V]."""
Sampling = Callable[[Mode, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
"""(mode, logits, rows, positions, out [B] int32, allowed [B, words] int32 or None)."""
MixedForward = Callable[[Tensor, Tensor, GraphBucket, PromptStep, Tensor], Tensor]
"""(rows [T] int32, positions [T] int32, shape, prompts, attended [T, heads, head_dim]) -> hidden [T, hidden]."""
PROMPTS = 64
"""Rows of several tokens that a graph has room for; a step of more runs eagerly. FlashInfer's planning looks at each
place for one, used or not."""


class StepGraphs:
    """Captured steps by slot and shape."""

    def __init__(
        self,
        rows: tuple[int, ...],
        singles: tuple[int, ...],
        tokens: tuple[int, ...],
        decode: list[dict[int, CapturedDecode]],
        mixed: list[dict[GraphBucket, CapturedMixed]],
    ) -> None:
        """rows: of decode steps; singles, tokens: of the shapes of mixed ones; all ascending. decode, mixed: one
        dictionary a slot."""
        self.rows = rows
        self.singles = singles
        self.tokens = tokens
        self.decode = decode
        self.mixed = mixed

    def shape(self, plan: StepPlan) -> GraphBucket | None:
        """The smallest shape that a step fits, or None: no graph is large enough, or a single token is no sample."""
        if plan.is_decode_only:
            rows = _at_least(len(plan.rows), self.rows)
            return None if rows is None else GraphBucket(rows, 0)
        wanted = exact_bucket(plan)
        if wanted.tokens == 0:
            rows = _at_least(wanted.singles, self.rows) if all(_sampled(row) for row in plan.rows) else None
            return None if rows is None else GraphBucket(rows, 0)
        singles, tokens = _at_least(wanted.singles, self.singles), _at_least(wanted.tokens, self.tokens)
        if singles is None or tokens is None or len(plan.rows) - wanted.singles > PROMPTS:
            return None
        return GraphBucket(singles, tokens)


def _sampled(row: ScheduledSequence) -> bool:
    """Whether a single token is what a decode step's graph takes it for."""
    return row.samples and not row.targets


def _at_least(wanted: int, sizes: tuple[int, ...]) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def capture_decode(
    pool: Any,
    buckets: tuple[int, ...],
    slots: list[StepSlot],
    forward: Forward,
    sampling: Sampling,
    progress: Callable[[int], None],
) -> list[dict[int, CapturedDecode]]:
    """Captures every slot's decode steps, the largest bucket first, so that the smaller ones reuse its memory.

    Every path runs once before it is captured: kernels are compiled and scratch memory is allocated by that. The
    inputs are padding meanwhile. progress: called with a percentage.
    """
    steps: list[dict[int, CapturedDecode]] = [{} for _ in slots]
    for done, bucket in enumerate(reversed(buckets)):
        for slot, captured in zip(slots, steps, strict=True):
            slot.device_inputs.zero_()
            rows, positions = slot.device_inputs[:bucket], slot.device_inputs[bucket : 2 * bucket]
            out, allowed = slot.sampled[:bucket], slot.allowed[:bucket]
            if slot is slots[0]:
                logits = forward(rows, positions)
                for mode in Mode:
                    sampling(mode, logits, rows, positions, out, None)
                sampling(Mode.FULL, logits, rows, positions, out, allowed)
                torch.cuda.current_stream().synchronize()
            captured[bucket] = _capture_step(pool, rows, positions, out, allowed, forward, sampling)
        progress(100 * (done + 1) // len(buckets))
    return steps


def capture_mixed(
    pool: Any,
    singles: tuple[int, ...],
    tokens: tuple[int, ...],
    slots: list[StepSlot],
    forward: MixedForward,
    prompts: Callable[[int, int], GraphPromptPlanner],
    buffers: MixedBuffers,
    progress: Callable[[int], None],
) -> list[dict[GraphBucket, CapturedMixed]]:
    """Captures every slot's steps with prompts, the largest first.

    prompts: makes the planner of a slot, by its number, for graphs with that many tokens of prompts.
    """
    steps: list[dict[GraphBucket, CapturedMixed]] = [{} for _ in slots]
    for done, count in enumerate(reversed(tokens)):
        for number, (slot, captured) in enumerate(zip(slots, steps, strict=True)):
            slot.device_inputs.zero_()
            planner = prompts(number, count)
            for rows_before in reversed(singles):
                shape = GraphBucket(rows_before, count)
                total = sum(shape)
                rows, positions = slot.device_inputs[:total], slot.device_inputs[total : 2 * total]
                own = buffers.first(total)
                work = partial(forward, rows, positions, shape, planner.step, own.attended)
                if slot is slots[0]:
                    work()
                    torch.cuda.current_stream().synchronize()
                graph, _ = _record(pool, partial(_leave, own.hidden, work))
                captured[shape] = CapturedMixed(graph, own, planner)
        progress(100 * (done + 1) // len(tokens))
    return steps


def _leave(out: Tensor, work: Callable[[], Tensor]) -> None:
    out.copy_(work())


def _capture_step(
    pool: Any,
    rows: Tensor,
    positions: Tensor,
    out: Tensor,
    allowed: Tensor,
    forward: Forward,
    sampling: Sampling,
) -> CapturedDecode:
    graph, logits = _record(pool, lambda: forward(rows, positions))
    assert logits is not None
    ways = {mode: _record(pool, partial(sampling, mode, logits, rows, positions, out, None))[0] for mode in Mode}
    masked, _ = _record(pool, partial(sampling, Mode.FULL, logits, rows, positions, out, allowed))
    return CapturedDecode(graph, logits, ways, masked)


def _record(pool: Any, work: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
    """`torch.cuda.graph` would collect garbage and empty caches at each of some hundred captures."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    result = work()
    graph.capture_end()
    return graph, result
