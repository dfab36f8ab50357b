"""Steps as CUDA graphs.

A slot's inputs have fixed addresses; the CPU only fills them and replays the graphs. A step takes the graph of the
smallest bucket that it fits; what it leaves free is padding: row 0, position 0, page 0. The forward pass of a step of
single tokens and its sampling modes are captured separately and replayed one after the other, so the number of graphs
is a sum, not a product. The forward pass of a step with prompts is captured as far as the final hidden states. All
graphs share one memory pool: they run one at a time, in stream order (I1).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner, PromptStep
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import DecodeGraphs, GraphRecorder, MixedBuffers, MixedGraph
from tandem.engine_core.runtime.graph_bucket import GraphBucket, exact_bucket
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.sampling.sampler import Mode

Forward = Callable[[Tensor, Tensor], Tensor]
"""Decode step: (rows [B] int32, positions [B] int32) -> logits [B, V]."""
Sampling = Callable[[Mode, SamplingBatch], None]
"""Sampling of a batch in one mode."""
MixedForward = Callable[[Tensor, Tensor, GraphBucket, PromptStep, Tensor], Tensor]
"""Step with prompts: (rows [T] int32, positions [T] int32, bucket, prompts, attended [T, heads, head_dim]) -> hidden
[T, hidden]."""
MAX_PROMPTS = 64
"""Most rows of several tokens that a graph has room for; a step with more runs eagerly. FlashInfer plans for each of
them, used or not."""


class StepGraphs:
    """The captured steps, by slot and bucket."""

    def __init__(
        self,
        rows: tuple[int, ...],
        shapes: Mapping[int, Sequence[int]],
        decode: list[dict[int, DecodeGraphs]],
        mixed: list[dict[GraphBucket, MixedGraph]],
    ) -> None:
        """Keep captured steps and the sizes of their buckets.

        rows: sizes of decode steps, ascending; shapes: numbers of single tokens that are captured beside each token
        count of mixed steps, ascending; decode, mixed: one dictionary per slot, by row count and by bucket.
        """
        self.rows = rows
        self.shapes = shapes
        self._tokens = tuple(sorted(shapes))
        self.decode = decode
        self.mixed = mixed

    def bucket(self, plan: StepPlan) -> GraphBucket | None:
        """Return the smallest bucket that a step fits.

        None if no graph is large enough, or if the step has single tokens that are not plain samples. The largest token
        counts are captured without single tokens.
        """
        if plan.is_decode_only:
            rows = _at_least(len(plan.rows), self.rows)
            return None if rows is None else GraphBucket(rows, 0)
        wanted = exact_bucket(plan)
        if wanted.num_prefill_tokens == 0:
            rows = (
                _at_least(wanted.num_decode_tokens, self.rows) if all(_is_sampled(row) for row in plan.rows) else None
            )
            return None if rows is None else GraphBucket(rows, 0)
        tokens = _at_least(wanted.num_prefill_tokens, self._tokens)
        if tokens is None or len(plan.rows) - wanted.num_decode_tokens > MAX_PROMPTS:
            return None
        singles = _at_least(wanted.num_decode_tokens, self.shapes[tokens])
        return None if singles is None else GraphBucket(singles, tokens)


def _is_sampled(row: ScheduledSequence) -> bool:
    """Return True if a row of a single token is sampled from and not scored.

    A decode step's graph serves no other rows.
    """
    return row.samples and not row.targets


def _at_least(wanted: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def capture_decode(
    recorder: GraphRecorder,
    buckets: tuple[int, ...],
    slots: list[StepSlot],
    forward: Forward,
    sampling: Sampling,
    progress: Callable[[int], None],
) -> list[dict[int, DecodeGraphs]]:
    """Capture the decode steps of every slot.

    The largest bucket is captured first, so that the smaller ones reuse its memory. Every path runs once before it is
    captured, which compiles its kernels and allocates its scratch memory. The inputs are padding meanwhile. progress:
    called with a percentage.
    """
    steps: list[dict[int, DecodeGraphs]] = [{} for _ in slots]
    for done, bucket in enumerate(reversed(buckets)):
        for slot, captured in zip(slots, steps, strict=True):
            slot.device_inputs.zero_()
            rows, positions = slot.device_inputs[:bucket], slot.device_inputs[bucket : 2 * bucket]
            if slot is slots[0]:
                logits = forward(rows, positions)
                for mode in Mode:
                    sampling(mode, _batch(slot, logits, mode))
                recorder.synchronize()
            graph, captured_logits = recorder.record(partial(forward, rows, positions))
            assert captured_logits is not None
            sampled = {
                mode: recorder.record(partial(sampling, mode, _batch(slot, captured_logits, mode)))[0] for mode in Mode
            }
            captured[bucket] = DecodeGraphs(graph, captured_logits, sampled)
        progress(100 * (done + 1) // len(buckets))
    return steps


def capture_mixed(
    recorder: GraphRecorder,
    shapes: Mapping[int, Sequence[int]],
    slots: list[StepSlot],
    forward: MixedForward,
    prompts: Callable[[int, int], GraphPromptPlanner],
    buffers: MixedBuffers,
    progress: Callable[[int], None],
) -> list[dict[GraphBucket, MixedGraph]]:
    """Capture the steps with prompts of every slot, the largest first.

    shapes: numbers of single tokens that are captured beside each token count, both ascending; prompts: makes the
    planner of a slot, by its number, for graphs with that many tokens of prompts. progress: called with a percentage.
    """
    steps: list[dict[GraphBucket, MixedGraph]] = [{} for _ in slots]
    for done, count in enumerate(sorted(shapes, reverse=True)):
        for number, (slot, captured) in enumerate(zip(slots, steps, strict=True)):
            slot.device_inputs.zero_()
            planner = prompts(number, count)
            for rows_before in reversed(shapes[count]):
                bucket = GraphBucket(rows_before, count)
                total = sum(bucket)
                rows, positions = slot.device_inputs[:total], slot.device_inputs[total : 2 * total]
                own = buffers.first(total)
                run = partial(forward, rows, positions, bucket, planner.step, own.attended)
                if slot is slots[0]:
                    run()
                    recorder.synchronize()
                graph, _ = recorder.record(partial(_copy_into, own.hidden, run))
                captured[bucket] = MixedGraph(graph, own, planner)
        progress(100 * (done + 1) // len(shapes))
    return steps


def _copy_into(out: Tensor, fn: Callable[[], Tensor]) -> None:
    out.copy_(fn())


def _batch(slot: StepSlot, logits: Tensor, mode: Mode) -> SamplingBatch:
    """Return the sampling inputs of a slot's decode step.

    logits: [rows, V], which determine the number of rows.
    """
    bucket = len(logits)
    return SamplingBatch(
        logits=logits,
        rows=slot.device_inputs[:bucket],
        positions=slot.device_inputs[bucket : 2 * bucket],
        sampled=slot.sampled[:bucket],
        allowed=slot.allowed[:bucket] if mode is Mode.MASKED else None,
    )
