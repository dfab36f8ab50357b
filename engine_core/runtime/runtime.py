"""Execution of step plans on a device, written once for CUDA and CPU."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.contracts import (
    PENDING_TOKEN,
    ArrivingTokens,
    DeviceTimes,
    MaskedRows,
    StepLogprobs,
    StepResult,
)
from tandem.engine_core.errors import DeviceMemoryError, FatalError
from tandem.engine_core.kernels.delta_rule.state import TokenRows
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.kernels.speculation.reference import DRAFTS_SHIFT, SOURCE_SHIFT
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.models.registry import Model
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.device import Device, StepClock
from tandem.engine_core.runtime.graph_bucket import GraphBucket, long_spans
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.runtime.kept_logits import KeptLogits
from tandem.engine_core.runtime.masks import MaskFiller, index_masks, mask_indices
from tandem.engine_core.runtime.row_adapters import RowAdapters
from tandem.engine_core.runtime.slots import HEAD_WORDS, StepSlot
from tandem.engine_core.runtime.speculation import Speculator
from tandem.engine_core.runtime.staging import Packed, pack
from tandem.engine_core.runtime.tables import DeviceTables, field, wide_field
from tandem.engine_core.runtime.verify_spans import verify_spans
from tandem.engine_core.sampling.processed_logprobs import ProcessedLogprobs
from tandem.engine_core.sampling.sampler import Mode, Sampler
from tandem.engine_core.sampling.scorer import PROMPT_SLICE, TokenScorer, token_ranks

CONTINUOUS_SECONDS = 0.02
"""Longest pause between results and the next launch that counts as a gap of the loop, in seconds."""


class TorchRuntime:
    """Implement `contracts.Runtime` for one model on one device.

    The number of slots is the depth of the pipeline.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        sampler: Sampler,
        scorer: TokenScorer,
        filler: MaskFiller,
        slots: list[StepSlot],
        page_tables: Sequence[PageTable],
        graphs: StepGraphs | None = None,
        clock: StepClock | None = None,
        speculator: Speculator | None = None,
        adapters: RowAdapters | None = None,
        processed: ProcessedLogprobs | None = None,
    ) -> None:
        self.device = device
        self.model = model
        self.kv = kv
        self.tables = tables
        self.sampler = sampler
        self.scorer = scorer
        self.filler = filler
        self.slots = slots
        self.page_tables = page_tables
        self.graphs = graphs
        self.clock = clock
        self.speculator = speculator
        self.adapters = adapters
        self.processed = processed
        """Scores sampled tokens; None: their log-probabilities are the model's own."""
        self._collected = 0.0

    def needs_exact_positions(self, plan: StepPlan) -> bool:
        # Steps that no graph holds plan their attention on the host.
        return plan.max_lead > 0 and (self.graphs is None or self.graphs.bucket(plan) is None)

    def stage(self, slot: int, plan: StepPlan) -> None:
        s = self.slots[slot]
        assert s.plan is None, f"slot {slot} staged while step {s.plan.step_id} holds it (I6)"
        bucket = self.graphs.bucket(plan) if self.graphs is not None else None
        max_len, columns = self.tables.tokens.shape[1], self.tables.columns
        capacity = self.graphs.sample_capacity(bucket) if self.graphs is not None and bucket is not None else 0
        packed = pack(plan, max_len, columns, s.inputs_view, bucket, capacity)
        self.tables.note(plan.admitted)
        if plan.logprobs >= 0:
            wanted = np.repeat(self.tables.needs_logprobs[packed.sample_rows], 1 + plan.num_drafts)
            packed.add("record_index", np.flatnonzero(wanted).astype(np.int32))
        if packed.has_updates:
            s.locations_view[:] = packed.locate_updates()
        s.plan, s.packed, s.bucket, s.graphs, s.sampling = plan, packed, bucket, None, None
        s.num_verified_rows = 0
        s.kept_logits = KeptLogits(plan) if any(row.logits for row in plan.other_rows) else None
        s.mask_indices = mask_indices(plan) if plan.needs_mask else {}

    @torch.inference_mode()
    def launch(self, slot: int, plan: StepPlan) -> None:
        """Enqueue a step up to its logits.

        These are the copies to the device, the updates of the tables, and the forward pass. A step that runs out of
        memory is launched again after the allocator has released its cache, since repeating it writes the same values.

        Raises DeviceMemoryError if the second attempt fails too, and FatalError instead of a second attempt if the
        model has recurrent layers: the first may have advanced their states.
        """
        s = self.slots[slot]
        if s.plan is not plan:
            self.stage(slot, plan)
        assert s.packed is not None and s.logits is None, f"slot {slot} launched twice with step {plan.step_id}"
        enqueued = self._enqueue(slot, s.packed, s.bucket)
        if not enqueued and self.kv.recurrent:
            raise FatalError(
                f"a step of {plan.total_tokens} positions ran out of device memory after it had changed the state of "
                "some recurrent layers; start the engine with a lower --gpu-memory or --max-step-tokens"
            )
        if not enqueued:
            # Only here may the launch path synchronise (I7); the cache holds blocks that no step uses.
            self.device.release_unused()
            enqueued = self._enqueue(slot, s.packed, s.bucket)
        if not enqueued:
            # Enqueued work reads the slot's pinned memory, which the next step overwrites.
            self.device.synchronize()
            s.plan = s.packed = s.logits = None
            raise DeviceMemoryError(
                f"a step of {plan.total_tokens} positions, with {self.device.free_bytes()} bytes free"
            )
        if plan.needs_mask and self.clock is not None:
            self.clock.pause(plan.step_id)

    def _enqueue(self, slot: int, packed: Packed, bucket: GraphBucket | None) -> bool:
        """Enqueue the copy, the updates and the forward pass of a step.

        Return False if there was too little memory; no tensor of the attempt is held any more then.
        """
        s = self.slots[slot]
        inputs = s.device_inputs[: packed.total]
        if s.kept_logits is not None:
            s.kept_logits.clear()
        try:
            with self.device.upload():
                # Concurrently with the previous step, which reads none of this: it is in another slot.
                words = HEAD_WORDS + packed.total
                s.device_memory[:words].copy_(s.host_memory[:words], non_blocking=True)
                if bucket is not None and bucket.num_prefill_tokens:
                    assert self.graphs is not None and s.plan is not None
                    self.graphs.mixed[slot][bucket].prompts.plan(long_spans(s.plan))
                s.uploaded.record()
            s.uploaded.wait()
            self.tables.apply(inputs, packed, self.graphs.updates[slot] if self.graphs is not None else None)
            assert s.plan is not None
            if s.plan.saves or s.plan.loads:
                self._copy_states(s.plan)
            if s.plan.draft_spans:
                self._compute_drafts(slot, s.plan, packed, inputs)
            if bucket is None:
                assert s.plan is not None
                batch = self._verify_batch(s, inputs) if s.plan.num_drafts else self._batch(s, inputs)
                self._begin(s)
                hidden = self.model.forward(batch, self.kv)
                if s.plan.num_drafts:
                    s.logits = self.model.logits(hidden)
                else:
                    self._compute_logits(s, hidden, inputs)
            else:
                self._replay(slot, bucket, inputs)
        except torch.OutOfMemoryError:
            s.logits = None
            return False
        return True

    def _copy_states(self, plan: StepPlan) -> None:
        """Enqueue the copies of recurrent states: after all steps before, in front of the forward pass."""
        checkpoints = self.kv.checkpoints
        assert checkpoints is not None, f"step {plan.step_id} copies states"
        for save in plan.saves:
            checkpoints.save(save.row, save.slot, save.position)
        for load in plan.loads:
            checkpoints.load(load.slot, load.row, load.position)

    def _compute_drafts(self, slot: int, plan: StepPlan, packed: Packed, inputs: Tensor) -> None:
        """Enqueue the draft model's pass over known tokens."""
        assert self.speculator is not None and self.speculator.model is not None, f"{plan.draft_spans} without a model"
        spans, offset = list[Span](), 0
        for span in plan.draft_spans:
            spans.append(Span(span.row, offset, span.start, span.length))
            offset += span.length
        rows, positions = field(inputs, packed, "draft_rows"), field(inputs, packed, "draft_positions")
        ends = wide_field(inputs, packed, "draft_end_rows"), field(inputs, packed, "draft_ends")
        graph = None if self.graphs is None else self.graphs.draft_prompt(slot, len(spans), offset)
        self.speculator.model.compute(slot, spans, rows, positions, ends, graph)

    def arriving_tokens(self, slot: int, masks: MaskedRows) -> ArrivingTokens:
        s = self.slots[slot]
        assert s.packed is not None, f"slot {slot} was not launched"
        index = s.packed.read("mask_index")
        if len(masks) == len(index):
            return ArrivingTokens(s.results_memory, range(len(masks)))
        indices = np.flatnonzero(index)
        if len(masks) < len(indices):
            indices = indices[[s.mask_indices[row] for row, _ in masks]]
        return ArrivingTokens(s.results_memory, indices.tolist())

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        s = self.slots[slot]
        assert s.plan is not None, f"slot {slot} was not launched"
        # The copy of the masks before these has run: the slot's last step has committed (I6).
        self.filler.prefetch(index_masks(masks, s.mask_indices), s.masks_view)

    @torch.inference_mode()
    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        """Enqueue the sampling of a launched step.

        These are the sampling, the write of the tokens into the table, and their copy to the host (I3).
        """
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None and s.logits is not None, f"slot {slot} was not launched"
        count = len(s.packed.sample_rows) * (1 + s.plan.num_drafts)
        if masks is not None:
            s.results_view[:count] = PENDING_TOKEN
        allowed = self._upload_masks(s, masks) if masks is not None and count else None
        if s.plan.needs_mask and self.clock is not None:
            self.clock.resume(s.plan.step_id)
        num_words = count
        if s.kept_logits is not None:
            s.kept_logits.add_samples(s.logits)  # Before sampling, which may change them.
        if s.plan.num_drafts:
            num_words = self._sample_and_accept(s, s.logits, allowed)
        elif count:
            self._sample(s, s.logits[:count], allowed)
        if s.plan.logprobs >= 0 and s.packed.fields["record_index"][1]:
            # From the logits in a graph's buffer, before the next forward can overwrite them (I1).
            records, index = _record_view(s.records, 0, count, s.plan), field(s.device_inputs, s.packed, "record_index")
            if self.processed is None:
                self.scorer.run(s.logits[:count], s.sampled[:count], s.plan.logprobs, records, index)
            else:
                self.processed.run(self._sampled_batch(s, s.logits[:count], allowed), s.plan.logprobs, records, index)
        # A step of chunks only has no tokens, but its end must be awaited too (I6).
        if self.clock is not None:
            # Before the event that the copy waits for: once the results are here, this mark has been reached too.
            self.clock.end(s.plan.step_id)
        s.sampling_done.record()
        with self.device.copy():
            s.sampling_done.wait()
            s.results[:num_words].copy_(s.sampled[:num_words], non_blocking=True)
            if s.plan.logprobs >= 0:
                words = _num_record_words(s.plan) + _num_scored(s.plan)
                s.host_records[:words].copy_(s.records[:words], non_blocking=True)
            if s.kept_logits is not None:
                s.kept_logits.copy_to_host(self.device)
            s.copy_done.record()
        s.logits = None

    def collect(self, slot: int) -> StepResult:
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None, f"slot {slot} was not launched"
        s.copy_done.synchronize()
        self._collected = time.monotonic()
        milliseconds = self.clock.read(s.plan.step_id) if self.clock is not None else 0.0
        tokens: list[int] = s.results[: len(s.packed.sample_rows)].tolist()
        plan, s.plan, s.packed = s.plan, None, None
        if plan.num_drafts:
            return _verified_result(plan, s, milliseconds)
        counts = [1] * plan.num_steady + [int(row.samples) for row in plan.other_rows]
        if plan.logprobs < 0:
            return StepResult(counts, tokens, milliseconds=milliseconds)
        words = _num_record_words(plan)
        records = s.host_records[:words].numpy().tobytes()
        ranks = s.host_records[words : words + _num_scored(plan)].numpy().tobytes()
        kept, s.kept_logits = s.kept_logits, None
        logits = [] if kept is None else kept.take()
        return StepResult(counts, tokens, StepLogprobs(plan.logprobs, records, ranks), milliseconds, logits=logits)

    def synchronize(self) -> None:
        self.device.synchronize()

    def device_times(self) -> DeviceTimes:
        # A CPU runs a step while the loop waits for it, so it has no time of its own to be busy or idle.
        return self.clock.times if self.clock is not None and self.device.kind != "cpu" else DeviceTimes()

    def _replay(self, slot: int, bucket: GraphBucket, inputs: Tensor) -> None:
        """Enqueue the forward pass of a step by replaying its graph."""
        s, graphs = self.slots[slot], self.graphs
        assert graphs is not None and s.plan is not None and s.packed is not None
        if s.plan.num_drafts:
            verify = graphs.verify[slot][bucket.num_decode_tokens, s.plan.num_drafts]
            self._begin(s)
            if verify.drafts is not None:
                verify.drafts.replay(s.plan.num_drafts, self.tables.sampling_needs(s.packed, masked=False))
            verify.select(s.plan.has_adapters).replay()
            s.logits, s.sampling, s.num_verified_rows = verify.logits, verify.sampling, bucket.num_decode_tokens
            return
        if bucket.num_prefill_tokens == 0:
            s.graphs = graphs.decode[slot][bucket.num_decode_tokens]
            self._begin(s)
            s.graphs.select(s.packed.longest, s.plan.has_adapters).replay()
            s.logits, s.sampling = s.graphs.logits, s.graphs.sampling
            return
        mixed = graphs.mixed[slot][bucket]
        mixed.prompts.gather_pages()
        self._begin(s)
        mixed.select(s.plan.has_adapters).replay()
        s.logits = mixed.logits
        s.sampling = graphs.sampling(slot, len(s.packed.sample_rows), len(mixed.logits))
        if "prompt_logprob_ids" in s.packed.fields:
            scored = mixed.buffers.hidden[field(inputs, s.packed, "score_index").long()]
            self._score_prompts(s, scored, field(inputs, s.packed, "prompt_logprob_ids"))

    def _begin(self, s: StepSlot) -> None:
        """Start the clock of a step, right before its forward pass.

        Where the host takes longer to enqueue a step than the device to compute the one before, that is a gap: a step
        counted from its first update would look long instead, and the limit of prompts would fall just when fewer,
        larger steps are what the host can keep up with.
        """
        if self.clock is not None:
            assert s.plan is not None
            self.clock.begin(s.plan.step_id, time.monotonic() - self._collected < CONTINUOUS_SECONDS)

    def _compute_logits(self, s: StepSlot, hidden: Tensor, inputs: Tensor) -> None:
        """Compute the logits of the rows that sample, and score prompt positions.

        The log-probabilities of the scored positions go to the slot's records.

        hidden: [S + P, hidden], final states of the samples first and then of the scored positions.
        """
        assert s.packed is not None
        count = len(s.packed.sample_rows)
        s.logits = self.model.logits(hidden[:count]) if count else hidden[:count]
        if "prompt_logprob_ids" in s.packed.fields:
            self._score_prompts(s, hidden[count:], field(inputs, s.packed, "prompt_logprob_ids"))

    def _score_prompts(self, s: StepSlot, hidden: Tensor, targets: Tensor) -> None:
        """Score prompt positions slice by slice.

        Only the logits of one slice take memory at a time.

        hidden: [P, hidden] of the scored positions; targets: [P] int32, the tokens that follow them.
        """
        assert s.plan is not None and s.packed is not None
        count = len(s.packed.sample_rows)
        ranks = s.records[_num_record_words(s.plan) :]
        for first in range(0, len(targets), PROMPT_SLICE):
            chosen = targets[first : first + PROMPT_SLICE]
            records = _record_view(s.records, count + first, len(chosen), s.plan)
            logits = self.model.logits(hidden[first : first + PROMPT_SLICE])
            self.scorer.run(logits, chosen, s.plan.logprobs, records)
            ranks[first : first + len(chosen)] = token_ranks(logits, chosen)
            if s.kept_logits is not None:
                s.kept_logits.add_scored(first, logits)

    def _sample(self, s: StepSlot, logits: Tensor, allowed: Tensor | None) -> None:
        """Enqueue sampling, by a graph if the forward pass came from one.

        logits: [S, V]; allowed: [S, words].
        """
        assert s.packed is not None
        if s.sampling is not None:
            s.sampling[Mode.of(self.tables.sampling_needs(s.packed, allowed is not None))].replay()
        else:
            out = s.sampled[: len(logits)]
            self.sampler.sample(self.tables.sampling_batch(logits, s.device_inputs, s.packed, allowed, out))

    def _sampled_batch(self, s: StepSlot, logits: Tensor, allowed: Tensor | None) -> SamplingBatch:
        """Return the batch that a step was sampled from. logits: [S, V]; allowed: [S, words]."""
        assert s.packed is not None and s.plan is not None
        count, sampled = len(logits), s.sampled[: len(logits)]
        if s.sampling is None and not s.plan.num_drafts:
            return self.tables.sampling_batch(logits, s.device_inputs, s.packed, allowed, sampled)
        rows, positions = s.sample_rows[:count], s.sample_positions[:count]
        needs = self.tables.sampling_needs(s.packed, allowed is not None)
        return SamplingBatch(logits, rows, positions, sampled, allowed, needs, s.packed.longest)

    def _sample_and_accept(self, s: StepSlot, logits: Tensor, allowed: Tensor | None) -> int:
        """Enqueue the sampling of all positions of a step that verifies drafts, and the acceptance.

        Return the number of words of its results. allowed: mask of each position, [S, words].
        """
        assert s.packed is not None and s.plan is not None and self.speculator is not None
        rows, count, needs = s.num_verified_rows, len(logits), self.tables.sampling_needs(s.packed, allowed is not None)
        if s.sampling is not None:
            s.sampling[Mode.of(needs)].replay()
        else:
            sampled, longest = s.sampled[:count], s.packed.longest
            given = s.sample_rows[:count], s.sample_positions[:count], sampled
            masked = None if allowed is None else field(s.device_inputs, s.packed, "mask_index")
            batch = SamplingBatch(logits, *given, allowed, needs, longest, masked, publish=False)
            self.sampler.sample(batch)
            of_rows = field(s.device_inputs, s.packed, "token_rows")
            self.speculator.accept(of_rows, s.plan.num_drafts, s.sampled[: count + rows])
        return count + rows

    def _verify_batch(self, s: StepSlot, inputs: Tensor) -> ForwardBatch:
        """Propose drafts, and return the inputs of a step that verifies them without a graph, on a CPU."""
        assert s.packed is not None and s.plan is not None and self.speculator is not None
        rows = field(inputs, s.packed, "token_rows")
        s.num_verified_rows = len(rows)
        queries = 1 + s.plan.num_drafts
        samples = s.sample_rows[: len(rows) * queries], s.sample_positions[: len(rows) * queries]
        needs = self.tables.sampling_needs(s.packed, masked=False)
        self.speculator.propose(rows, s.plan.num_drafts, needs)
        tokens = self.speculator.verify_inputs(rows, s.plan.num_drafts, self.page_tables, samples)
        return ForwardBatch(
            input_ids=tokens.input_ids,
            positions=tokens.positions.long(),
            slot_mapping=tokens.slot_mapping.unbind(),
            sample_index=None,
            attention=s.attention.plan(verify_spans(tokens, queries), self.page_tables),
            tokens=TokenRows(samples[0], tokens.positions, queries=queries) if self.kv.recurrent else None,
            has_drafts=True,
            adapters=self._adapters(s.plan, tokens.rows),
        )

    def _batch(self, s: StepSlot, inputs: Tensor) -> ForwardBatch:
        assert s.plan is not None and s.packed is not None
        packed = s.packed
        rows, positions = field(inputs, packed, "token_rows"), field(inputs, packed, "positions")
        self.tables.sampling.find_positions(rows, positions)
        rows, positions = rows.long(), positions.long()
        index = field(inputs, packed, "sample_index")
        if "prompt_logprob_ids" in packed.fields:
            index = torch.cat([index, field(inputs, packed, "score_index")])
        return ForwardBatch(
            input_ids=self.tables.tokens[rows, positions].long(),
            positions=positions,
            slot_mapping=[table.slots(rows, positions) for table in self.page_tables],
            sample_index=index.long(),
            attention=s.attention.plan(_spans(s.plan), self.page_tables),
            tokens=self._tokens(s.plan, field(inputs, packed, "token_rows"), positions),
            adapters=self._adapters(s.plan, field(inputs, packed, "token_rows")),
        )

    def _adapters(self, plan: StepPlan, rows: Tensor) -> AdapterTokens | None:
        """Return the adapters of a step's tokens, None if no row has one. rows: [T] int32."""
        if not plan.has_adapters:
            return None
        assert self.adapters is not None, "a row with an adapter, without memory for adapters"
        return self.adapters.of(rows)

    def _tokens(self, plan: StepPlan, rows: Tensor, positions: Tensor) -> TokenRows | None:
        """Return the rows of a step's tokens for recurrent layers, None if there are none."""
        if not self.kv.recurrent:
            return None
        return TokenRows(rows, positions, plan.num_steady, len(plan.rows) - plan.num_steady)

    def _upload_masks(self, s: StepSlot, masks: MaskedRows) -> Tensor:
        """Return the mask of each token that is sampled from, [S, words].

        Only the masks of the constrained rows are filled and copied to the device. The other rows get the mask that
        allows everything; where there are none, the masks are copied directly.
        """
        assert s.plan is not None and s.packed is not None
        index = field(s.device_inputs, s.packed, "mask_index")
        indices, allowed = s.mask_indices, s.allowed[: len(index)]
        self.filler.fill(index_masks(masks, indices), s.masks_view)
        if len(masks) < len(indices):
            # Rows whose token is not needed any more must not depend on what an earlier step left here, or on a mask
            # that was begun.
            unused = indices.keys() - {row for row, _ in masks}
            s.masks_view[[indices[row] for row in unused]] = -1
        in_order = len(indices) == len(allowed)
        with self.device.copy():
            # Concurrently with the forward pass on the compute stream: nothing there reads the masks before the wait.
            copied = allowed if in_order else s.device_masks[1 : 1 + len(indices)]
            copied.copy_(s.host_masks[: len(indices)], non_blocking=True)
            s.masks_done.record()
        s.masks_done.wait()
        if not in_order or len(index) > s.num_in_order:
            # If every row of a step has a mask, the indices are the same each time.
            torch.add(index, 0, out=s.masked[: len(index)])
            s.num_in_order = len(index) if in_order else 0
        return allowed if in_order else torch.index_select(s.device_masks, 0, index, out=allowed)


def _num_record_words(plan: StepPlan) -> int:
    """Return the number of words of a step's log-probabilities.

    The layout is described in `StepLogprobs`.
    """
    records = sum([row.samples + row.num_scored for row in plan.rows])
    return records * (1 + plan.num_drafts) * (1 + 2 * plan.logprobs)


def _num_scored(plan: StepPlan) -> int:
    """Return the number of prompt positions with log-probabilities; steps that verify drafts have none."""
    return 0 if plan.num_drafts else sum([row.num_scored for row in plan.rows])


def _record_view(words: Tensor, first: int, count: int, plan: StepPlan) -> Tensor:
    """Return `count` records of a step from `first` on, [count, 1 + 2 * top]."""
    width = 1 + 2 * plan.logprobs
    return words[first * width : (first + count) * width].view(count, width)


def _verified_result(plan: StepPlan, s: StepSlot, milliseconds: float) -> StepResult:
    """Return the runs of a step that verified drafts, with the log-probabilities of their tokens.

    The slot has the results of all positions: sampled tokens, then the counts of rows, as `Speculator.accept` leaves
    them; `num_verified_rows` includes padding.
    """
    queries, num_rows, words = 1 + plan.num_drafts, len(plan.rows), s.results.numpy()
    first = s.num_verified_rows * queries
    packed = words[first : first + num_rows]
    counts = packed & 0xFF
    is_new = (np.arange(queries) < counts[:, None]).reshape(-1)
    logprobs = None
    if plan.logprobs >= 0:
        records = s.host_records[: _num_record_words(plan)].numpy().reshape(num_rows * queries, -1)
        logprobs = StepLogprobs(plan.logprobs, records[is_new].tobytes())
    return StepResult(
        counts.tolist(),
        words[: num_rows * queries][is_new].tolist(),
        logprobs,
        milliseconds,
        num_drafts=(packed >> DRAFTS_SHIFT & 0xFF).tolist(),
        predicted=(packed >> SOURCE_SHIFT > 0).tolist(),
    )


def _spans(plan: StepPlan) -> list[Span]:
    spans = []
    offset = 0
    for row in plan.rows:
        spans.append(Span(row.row, offset, row.start, row.length))
        offset += row.length
    return spans
