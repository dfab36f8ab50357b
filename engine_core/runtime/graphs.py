"""Steps as CUDA graphs.

A slot's inputs have fixed addresses; the CPU only fills them and replays the graphs. A step takes the graph of the
smallest bucket that it fits, or of a larger one that is faster: some cuBLAS GEMMs are slower than larger ones. The rest
of the bucket is padding: row 0, position 0, page 0. Forward passes, as far as the logits, and modes of sampling are
captured separately and replayed one after the other, so the number of graphs is a sum, not a product. Sampling is
captured by the number of samples alone: every forward pass leaves rows, positions and logits in the same memory. All
graphs share one memory pool: they run one at a time, in stream order (I1).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from tandem.engine_core.attention.base import GraphPromptPlanner, PromptStep
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import (
    NO_GROWTH,
    DecodeGraphs,
    DraftGraphs,
    DraftPromptGraph,
    Graph,
    GraphRecorder,
    Growth,
    MixedBuffers,
    MixedGraph,
    SampleBuffers,
    VerifyGraphs,
)
from tandem.engine_core.runtime.graph_bucket import GraphBucket, exact_bucket
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.sampling.sampler import Mode

Forward = Callable[[Tensor, Tensor, SampleBuffers, bool], Tensor]
"""Decode step: (rows [B] int32, positions [B] int32, buffers of B samples, has_long_rows) -> logits [B, V]."""
Sampling = Callable[[Mode, SamplingBatch], None]
"""Sampling of a batch in one mode."""
VerifyForward = Callable[[Tensor, int, SampleBuffers], Tensor]
"""Step that verifies drafts: (rows [B] int32, drafts of a row, buffers of B * (1 + drafts) samples) -> logits."""
DraftForward = Callable[[Tensor, SampleBuffers, bool], Tensor]
"""Pass of a draft model: (rows [B] int32, buffers of B samples, True before the first draft of a step) -> logits."""
DraftPromptForward = Callable[[Tensor, Tensor, PromptStep, Tensor], Tensor]
"""Pass of a draft model over known tokens: (rows [T] int32, positions [T] int32, attention, attended [T, heads,
head_dim]) -> hidden [T, hidden]."""
DRAFT_MODES = (Mode.GREEDY, Mode.UNTRUNCATED, Mode.FULL)
"""Modes of sampling drafts: a row with a mask has none."""
Accept = Callable[[Tensor, int, Tensor], None]
"""Acceptance: (rows [B] int32, drafts of a row, sampled tokens and counts of rows)."""
MixedForward = Callable[[Tensor, Tensor, GraphBucket, PromptStep, Tensor], Tensor]
"""Step with prompts: (rows [T] int32, positions [T] int32, bucket, prompts, attended [T, heads, head_dim]) -> hidden
[T, hidden]."""
Head = Callable[[Tensor, Tensor, Tensor, Tensor, SampleBuffers], Tensor]
"""End of a step with prompts: (hidden [T, hidden], rows [T] int32, positions [T] int32, index [P] int32, buffers of P
samples) -> logits [P, V]."""
MAX_PROMPTS = 64
"""Maximum number of rows of several tokens in a graph; a step with more runs eagerly. FlashInfer plans all of them,
including unused ones."""


class GraphSizes(NamedTuple):
    """Sizes of the steps that are captured."""

    rows: Sequence[int]
    """Of decode steps, ascending."""
    shapes: Mapping[int, Sequence[int]]
    """Numbers of single tokens of steps with prompts, ascending, by the number of other tokens, ascending too."""


NO_SIZES = GraphSizes((), {})


class StepGraphs:
    """The captured steps, by slot and bucket."""

    def __init__(
        self,
        rows: tuple[int, ...],
        shapes: Mapping[int, Sequence[int]],
        decode: list[dict[int, DecodeGraphs]],
        mixed: list[dict[GraphBucket, MixedGraph]],
        updates: list[Graph],
        verify: list[dict[tuple[int, int], VerifyGraphs]] | None = None,
        verify_growth: Growth = NO_GROWTH,
        adapted: GraphSizes = NO_SIZES,
        draft_prompts: list[dict[int, DraftPromptGraph]] | None = None,
    ) -> None:
        """Keep captured steps and the sizes of their buckets.

        rows: sizes of decode steps, ascending; shapes: numbers of single tokens that are captured for each token count
        of mixed steps, ascending; decode, mixed: one dictionary per slot, by row count and by bucket; updates: per
        slot, of the tables before a step of any size; verify: steps that verify drafts, per slot by rows and drafts;
        verify_growth: what capturing these took; adapted: sizes that are captured with adapters as well; draft_prompts:
        passes of a draft model over known tokens, per slot by their number.
        """
        self.rows = rows
        self.shapes = shapes
        self._plain, self._adapted = GraphSizes(rows, shapes), adapted
        self.decode = decode
        self.mixed = mixed
        self.updates = updates
        self.verify = verify or [{} for _ in decode]
        self.verify_growth = verify_growth
        self.draft_prompts = draft_prompts or [{} for _ in decode]
        self._faster: Mapping[GraphBucket, GraphBucket] = {}

    def prefer(self, faster: Mapping[GraphBucket, GraphBucket]) -> None:
        """Use larger buckets instead of those that were measured to be slower."""
        self._faster = faster

    def bucket(self, plan: StepPlan) -> GraphBucket | None:
        """Return the smallest bucket that a step fits, or a larger one that is faster.

        None if no graph is large enough, or if the step has single tokens that are not plain samples. The largest
        token counts are captured without single tokens.
        """
        if plan.num_drafts:
            fitting_rows = [
                rows
                for (rows, drafts), graphs in sorted(self.verify[0].items())
                if drafts == plan.num_drafts and (graphs.adapted is not None or not plan.has_adapters)
            ]
            rows = _at_least(len(plan.rows), fitting_rows)
            return None if rows is None else GraphBucket(rows, 0)
        if plan.has_adapters:
            return self._smallest(plan, self._adapted)
        fitting = self._smallest(plan, self._plain)
        return None if fitting is None else self._faster.get(fitting, fitting)

    def _smallest(self, plan: StepPlan, sizes: GraphSizes) -> GraphBucket | None:
        if plan.is_decode_only:
            rows = _at_least(len(plan.rows), sizes.rows)
            return None if rows is None else GraphBucket(rows, 0)
        wanted = exact_bucket(plan)
        if wanted.num_prefill_tokens == 0:
            rows = (
                _at_least(wanted.num_decode_tokens, sizes.rows) if all(_is_sampled(row) for row in plan.rows) else None
            )
            return None if rows is None else GraphBucket(rows, 0)
        tokens = _at_least(wanted.num_prefill_tokens, sorted(sizes.shapes))
        if tokens is None or len(plan.rows) - wanted.num_decode_tokens > MAX_PROMPTS:
            return None
        singles = _at_least(wanted.num_decode_tokens, sizes.shapes[tokens])
        return None if singles is None else GraphBucket(singles, tokens)

    def draft_prompt(self, slot: int, spans: int, tokens: int) -> DraftPromptGraph | None:
        """Return the graph of a draft model's pass over known tokens; None if they are too many for all."""
        graphs = self.draft_prompts[slot]
        size = _at_least(tokens, sorted(graphs))
        return None if size is None or spans > MAX_PROMPTS else graphs[size]

    def sample_capacity(self, bucket: GraphBucket) -> int:
        """Return the number of samples that a bucket with prompts has room for, else 0."""
        return len(self.mixed[0][bucket].logits) if bucket.num_prefill_tokens else 0

    def sampling(self, slot: int, count: int, capacity: int) -> dict[Mode, Graph] | None:
        """Return the sampling graphs for the first `count` of a forward pass's sample slots.

        They also touch the slots up to their bucket, which must be padding. None: no bucket fits. capacity: number of
        sample slots.
        """
        rows = _at_least(count, self.rows)
        return None if rows is None or rows > capacity else self.decode[slot][rows].sampling


def max_samples(bucket: GraphBucket, rows: Sequence[int], max_rows: int) -> int:
    """Return the sample capacity of the graph of a step with prompts.

    This is the smallest sampling bucket that holds the most samples of such a step, or that number if none does. rows:
    sampling buckets, ascending.
    """
    prompts = min(MAX_PROMPTS, max(1, bucket.num_prefill_tokens // 2))
    most = min(bucket.num_decode_tokens + prompts, max_rows)
    return _at_least(most, rows) or most


def _is_sampled(row: ScheduledSequence) -> bool:
    """Return True if the graph of a decode step serves a row of a single token: it is sampled, without prompt
    log-probabilities.
    """
    return row.samples and not row.prompt_logprob_ids


def _at_least(wanted: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def capture_updates(
    recorder: GraphRecorder, slots: list[StepSlot], update: Callable[[Tensor, Tensor], None]
) -> list[Graph]:
    """Capture the updates of tables of every slot.

    update: writes a step's updates, given their locations in the inputs, and the inputs.
    """
    graphs: list[Graph] = []
    for slot in slots:
        # Locations left by an earlier step would point into inputs that have been overwritten.
        slot.device_locations.zero_()
        run = partial(update, slot.device_locations, slot.device_inputs)
        run()
        recorder.synchronize()
        graphs.append(recorder.record(run)[0])
    return graphs


def capture_decode(
    recorder: GraphRecorder,
    buckets: tuple[int, ...],
    slots: list[StepSlot],
    logits: Tensor,
    forward: Forward,
    max_short_len: Callable[[int], int],
    sampling: Sampling,
    progress: Callable[[int], None],
    adapted: Mapping[int, Forward],
) -> list[dict[int, DecodeGraphs]]:
    """Capture the decode steps of every slot.

    The largest bucket is captured first, so that the smaller ones reuse its memory. Every path runs once before it is
    captured, which compiles its kernels and allocates its scratch memory. The inputs are padding meanwhile. logits: of
    all graphs, [P, V]; max_short_len: returns the largest length of a bucket's short rows, 0 if long rows need no graph
    of their own; progress: called with a percentage; adapted: forward passes with adapters, by bucket.
    """
    steps: list[dict[int, DecodeGraphs]] = [{} for _ in slots]
    for done, bucket in enumerate(reversed(buckets)):
        for number, (slot, captured) in enumerate(zip(slots, steps, strict=True)):
            slot.device_inputs.zero_()
            samples = sample_buffers(slot, logits).first(bucket)
            given = slot.device_inputs[:bucket], slot.device_inputs[bucket : 2 * bucket], samples
            run = partial(forward, *given)
            run_adapted = partial(adapted[bucket], *given, True) if bucket in adapted else None
            lengths = (False, True) if max_short_len(bucket) else (True,)
            if number == 0:
                for has_long_rows in lengths:
                    run(has_long_rows)
                if run_adapted is not None:
                    run_adapted()
                for mode in Mode:
                    sampling(mode, _batch(slot, samples, mode))
                recorder.synchronize()
            graphs = [recorder.record(partial(run, has_long_rows))[0] for has_long_rows in lengths]
            sampled = {mode: recorder.record(partial(sampling, mode, _batch(slot, samples, mode)))[0] for mode in Mode}
            given_graphs = graphs[0], samples.logits, sampled, graphs[-1], max_short_len(bucket)
            captured[bucket] = DecodeGraphs(*given_graphs, _recorded(recorder, run_adapted))
        progress(100 * (done + 1) // len(buckets))
    return steps


def capture_verify(
    recorder: GraphRecorder,
    shapes: Sequence[tuple[int, int]],
    slots: list[StepSlot],
    logits: Tensor,
    forward: VerifyForward,
    sampling: Sampling,
    accept: Accept,
    adapted: Mapping[tuple[int, int], VerifyForward],
    passes: list[dict[int, DraftGraphs]] | None = None,
) -> list[dict[tuple[int, int], VerifyGraphs]]:
    """Capture the steps that verify drafts of every slot, the largest first.

    shapes: rows and drafts of each; logits, adapted: as for `capture_decode`; passes: per slot, those of a draft model
    by rows, None without one.
    """
    steps: list[dict[tuple[int, int], VerifyGraphs]] = [{} for _ in slots]
    for rows, drafts in sorted(shapes, key=lambda shape: shape[0] * (1 + shape[1]), reverse=True):
        count = rows * (1 + drafts)
        for number, (slot, captured) in enumerate(zip(slots, steps, strict=True)):
            slot.device_inputs.zero_()
            of_rows, samples = slot.device_inputs[:rows], sample_buffers(slot, logits).first(count)
            run = partial(forward, of_rows, drafts, samples)
            run_adapted = None
            if (rows, drafts) in adapted:
                run_adapted = partial(adapted[rows, drafts], of_rows, drafts, samples)
            batches = {mode: replace(_batch(slot, samples, mode), publish=False) for mode in Mode}
            end = partial(accept, of_rows, drafts, slot.sampled[: count + rows])
            ends = {mode: partial(_sample_and_accept, sampling, mode, batch, end) for mode, batch in batches.items()}
            if number == 0:
                run()
                if run_adapted is not None:
                    run_adapted()
                for sample in ends.values():
                    sample()
                recorder.synchronize()
            graph = recorder.record(run)[0]
            sampled: dict[Mode, Graph] = {mode: recorder.record(sample)[0] for mode, sample in ends.items()}
            given = graph, samples.logits, sampled, _recorded(recorder, run_adapted)
            captured[rows, drafts] = VerifyGraphs(*given, None if passes is None else passes[number][rows])
    return steps


def capture_drafts(
    recorder: GraphRecorder,
    row_counts: Sequence[int],
    slots: list[StepSlot],
    logits: Tensor,
    forward: DraftForward,
    sampling: Sampling,
    write: Callable[[Tensor, Tensor, Tensor], None],
) -> list[dict[int, DraftGraphs]]:
    """Capture the passes of a draft model of every slot, the largest first.

    logits: as for `capture_decode`; write: writes drafts into the token table, given the rows, those that are sampled
    from, and the sampled tokens.
    """
    passes: list[dict[int, DraftGraphs]] = [{} for _ in slots]
    for rows in sorted(row_counts, reverse=True):
        for number, (slot, captured) in enumerate(zip(slots, passes, strict=True)):
            slot.device_inputs.zero_()
            of_rows, samples = slot.device_inputs[:rows], sample_buffers(slot, logits).first(rows)
            first, following = (partial(forward, of_rows, samples, is_first) for is_first in (True, False))
            end = partial(write, of_rows, samples.rows, slot.sampled[:rows])
            batches = {mode: replace(_batch(slot, samples, mode), publish=False) for mode in DRAFT_MODES}
            ends = {mode: partial(_sample_and_accept, sampling, mode, batch, end) for mode, batch in batches.items()}
            if number == 0:
                for run in (first, following):
                    run()
                for sample in ends.values():
                    sample()
                recorder.synchronize()
            graphs = recorder.record(first)[0], recorder.record(following)[0]
            sampled: dict[Mode, Graph] = {mode: recorder.record(sample)[0] for mode, sample in ends.items()}
            captured[rows] = DraftGraphs(*graphs, sampled)
    return passes


def capture_draft_prompts(
    recorder: GraphRecorder,
    sizes: Sequence[int],
    num_slots: int,
    inputs: Tensor,
    attended: Tensor,
    forward: DraftPromptForward,
    prompts: Callable[[int, int], GraphPromptPlanner],
) -> list[dict[int, DraftPromptGraph]]:
    """Capture the passes of a draft model over known tokens of every slot, the largest first.

    sizes: numbers of tokens; inputs: [2, T] int32, zeros, of all graphs; attended: [T, heads, head_dim], zeros, of all
    graphs; prompts: as for `capture_mixed`.
    """
    passes: list[dict[int, DraftPromptGraph]] = [{} for _ in range(num_slots)]
    for tokens in sorted(sizes, reverse=True):
        rows, positions = inputs[:, :tokens].unbind()
        for number, captured in enumerate(passes):
            planner = prompts(number, tokens)
            run = partial(forward, rows, positions, planner.step, attended[:tokens])
            if number == 0:
                run()
                recorder.synchronize()
            captured[tokens] = DraftPromptGraph(recorder.record(run)[0], rows, positions, planner)
    return passes


def _sample_and_accept(sampling: Sampling, mode: Mode, batch: SamplingBatch, accept: Callable[[], None]) -> None:
    sampling(mode, batch)
    accept()


def capture_mixed(
    recorder: GraphRecorder,
    shapes: Mapping[GraphBucket, int],
    slots: list[StepSlot],
    logits: Tensor,
    forward: MixedForward,
    head: Head,
    prompts: Callable[[int, int], GraphPromptPlanner],
    buffers: MixedBuffers,
    progress: Callable[[int], None],
    adapted: Mapping[GraphBucket, MixedForward],
) -> list[dict[GraphBucket, MixedGraph]]:
    """Capture the steps with prompts of every slot, the largest first.

    shapes: buckets with their sample capacities; prompts: makes the planner of a slot, by its number, for
    graphs with that many tokens of prompts; logits, progress, adapted: as for `capture_decode`.
    """
    steps: list[dict[GraphBucket, MixedGraph]] = [{} for _ in slots]
    counts = sorted({bucket.num_prefill_tokens for bucket in shapes}, reverse=True)
    for done, count in enumerate(counts):
        of_count = sorted((bucket for bucket in shapes if bucket.num_prefill_tokens == count), reverse=True)
        for number, (slot, captured) in enumerate(zip(slots, steps, strict=True)):
            slot.device_inputs.zero_()
            planner = prompts(number, count)
            for bucket in of_count:
                own, samples = buffers.first(sum(bucket)), sample_buffers(slot, logits).first(shapes[bucket])
                of_bucket = partial(_run_mixed, slot, bucket, planner.step, own, samples, head)
                run = partial(of_bucket, forward)
                run_adapted = partial(of_bucket, adapted[bucket]) if bucket in adapted else None
                if number == 0:
                    run()
                    if run_adapted is not None:
                        run_adapted()
                    recorder.synchronize()
                graph, _ = recorder.record(run)
                captured[bucket] = MixedGraph(graph, samples.logits, own, planner, _recorded(recorder, run_adapted))
        progress(100 * (done + 1) // len(counts))
    return steps


def _run_mixed(
    slot: StepSlot,
    bucket: GraphBucket,
    prompts: PromptStep,
    buffers: MixedBuffers,
    samples: SampleBuffers,
    head: Head,
    forward: MixedForward,
) -> Tensor:
    """Compute the final states of all tokens, and the logits of the samples."""
    total, inputs = sum(bucket), slot.device_inputs
    rows, positions = inputs[:total], inputs[total : 2 * total]
    index = inputs[2 * total : 2 * total + len(samples.rows)]
    buffers.hidden.copy_(forward(rows, positions, bucket, prompts, buffers.attended))
    return head(buffers.hidden, rows, positions, index, samples)


def _recorded(recorder: GraphRecorder, run: Callable[[], Tensor] | None) -> Graph | None:
    return None if run is None else recorder.record(run)[0]


def sample_buffers(slot: StepSlot, logits: Tensor) -> SampleBuffers:
    """Return the sample buffers of a slot. logits: shared by all slots, [P, V]."""
    return SampleBuffers(slot.sample_rows[: len(logits)], slot.sample_positions[: len(logits)], logits)


def _batch(slot: StepSlot, samples: SampleBuffers, mode: Mode) -> SamplingBatch:
    """Return a slot's inputs of sampling."""
    count = len(samples.rows)
    return SamplingBatch(
        logits=samples.logits,
        rows=samples.rows,
        positions=samples.positions,
        sampled=slot.sampled[:count],
        allowed=slot.allowed[:count] if mode is Mode.MASKED else None,
        masked=slot.masked[:count] if mode is Mode.MASKED else None,
    )
