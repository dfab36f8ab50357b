"""Executes step plans on a device: `contracts.Runtime`, written once for CUDA and CPU."""

import time

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.contracts import DeviceTimes, Masks, StepLogprobs, StepResult
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.models.registry import Model
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.device import Device, GpuClock
from tandem.engine_core.runtime.graph_bucket import GraphBucket, long_spans, pack_padded
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.runtime.sampling import SLICE, MaskFiller, TokenSampler, TokenScorer
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.staging import Packed, mask_places, pack, pack_decode
from tandem.engine_core.runtime.tables import DeviceTables, field

CONTINUOUS_SECONDS = 0.02
"""A launch this soon after the last results belongs to the same run of work; a longer pause is not the loop's."""


class TorchRuntime:
    """One model on one device, with as many slots as the pipeline is deep."""

    def __init__(
        self,
        device: Device,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        sampler: TokenSampler,
        scorer: TokenScorer,
        filler: MaskFiller,
        slots: list[StepSlot],
        page_table: PageTable,
        graphs: StepGraphs | None = None,
        clock: GpuClock | None = None,
    ) -> None:
        self.device = device
        self.model = model
        self.kv = kv
        self.tables = tables
        self.sampler = sampler
        self.scorer = scorer
        self.filler = filler
        self.slots = slots
        self.page_table = page_table
        self.graphs = graphs
        self.clock = clock
        self._collected = 0.0

    @torch.inference_mode()
    def launch(self, slot: int, plan: StepPlan) -> None:
        """Enqueues one copy to the device, the news for the tables, and the forward pass."""
        s = self.slots[slot]
        assert s.plan is None, f"slot {slot} launched while step {s.plan.step_id} holds it (I6)"
        shape = self.graphs.shape(plan) if self.graphs is not None else None
        packed = self._pack(plan, shape, s)
        self.tables.note(plan.admitted)
        s.plan, s.packed, s.captured = plan, packed, None
        if self.clock is not None:
            self.clock.begin(plan.step_id, time.monotonic() - self._collected < CONTINUOUS_SECONDS)
        inputs = s.device_inputs[: packed.total]
        inputs.copy_(s.host_inputs[: packed.total], non_blocking=True)
        self.tables.apply(inputs, packed)
        if shape is None:
            hidden = self.model.forward(self._batch(s, inputs), self.kv)
            self._read_out(s, hidden, inputs)
        else:
            self._replay(slot, shape, inputs)

    @torch.inference_mode()
    def sample(self, slot: int, masks: Masks | None) -> None:
        """Enqueues sampling, the write of the tokens into the table, and their copy to the host (I3)."""
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None and s.logits is not None, f"slot {slot} was not launched"
        count = len(s.packed.sample_rows)
        allowed = self._upload_masks(s, masks) if masks is not None and count else None
        if s.captured is not None and "suppress" not in s.packed.fields:
            ways = s.captured
            (ways.sampling[self.tables.mode(s.packed)] if allowed is None else ways.masked).replay()
        elif count:
            self.sampler.run(s.logits[:count], s.device_inputs, s.packed, allowed, s.sampled[:count])
        if s.plan.logprobs >= 0 and count:
            # Out of the logits that a graph left, before the next forward can write there (I1).
            self.scorer.run(s.logits[:count], s.sampled[:count], s.plan.logprobs, _lines(s.lines, 0, count, s.plan))
        # A step of chunks alone has no tokens, but its end has to be waited for like any other's (I6).
        s.sampling_done.record()
        if self.clock is not None:
            self.clock.end(s.plan.step_id)
        with self.device.copy():
            s.sampling_done.wait()
            s.results[:count].copy_(s.sampled[:count], non_blocking=True)
            if s.plan.logprobs >= 0:
                words = _line_words(s.plan)
                s.host_lines[:words].copy_(s.lines[:words], non_blocking=True)
            s.copy_done.record()
        s.logits = None

    def collect(self, slot: int) -> StepResult:
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None, f"slot {slot} was not launched"
        s.copy_done.synchronize()
        self._collected = time.monotonic()
        if self.clock is not None:
            self.clock.read(s.plan.step_id)
        tokens: list[int] = s.results[: len(s.packed.sample_rows)].tolist()
        plan, s.plan, s.packed = s.plan, None, None
        counts = [1] * len(tokens) if len(tokens) == len(plan.rows) else [int(row.samples) for row in plan.rows]
        if plan.logprobs < 0:
            return StepResult(counts, tokens)
        records = s.host_lines[: _line_words(plan)].numpy().tobytes()
        return StepResult(counts, tokens, StepLogprobs(plan.logprobs, records))

    def synchronize(self) -> None:
        self.device.synchronize()

    def device_times(self) -> DeviceTimes:
        return self.clock.times if self.clock is not None else DeviceTimes()

    def _pack(self, plan: StepPlan, shape: GraphBucket | None, s: StepSlot) -> Packed:
        max_len, pages_per_row = self.tables.tokens.shape[1], self.tables.pages.shape[1]
        if plan.is_decode_only and shape is not None:
            return pack_decode(plan, shape.singles, pages_per_row, s.inputs_view)
        if shape is None:
            return pack(plan, max_len, pages_per_row, s.inputs_view)
        return pack_padded(plan, shape, max_len, pages_per_row, s.inputs_view)

    def _replay(self, slot: int, shape: GraphBucket, inputs: Tensor) -> None:
        """Enqueues the forward pass out of a graph."""
        s, graphs = self.slots[slot], self.graphs
        assert graphs is not None and s.plan is not None and s.packed is not None
        if shape.tokens == 0:
            s.captured = graphs.decode[slot][shape.singles]
            s.captured.forward.replay()
            s.logits = s.captured.logits
            return
        mixed = graphs.mixed[slot][shape]
        mixed.prompts.plan(long_spans(s.plan))
        mixed.forward.replay()
        self._read_out(s, mixed.buffers.hidden[field(inputs, s.packed, "sample_index").long()], inputs)

    def _read_out(self, s: StepSlot, hidden: Tensor, inputs: Tensor) -> None:
        """Logits of the rows that sample, and the log-probabilities of the positions that are scored.

        hidden: [S + P, hidden], final states of these and of those.
        """
        assert s.packed is not None
        count = len(s.packed.sample_rows)
        s.logits = self.model.logits(hidden[:count]) if count else hidden[:count]
        if "targets" in s.packed.fields:
            self._score_prompts(s, hidden[count:], field(inputs, s.packed, "targets"))

    def _score_prompts(self, s: StepSlot, hidden: Tensor, targets: Tensor) -> None:
        """Slice by slice, so that the logits of one slice are all the memory it takes.

        hidden: [P, hidden] of the scored positions; targets: [P] int32, the tokens that follow them.
        """
        assert s.plan is not None and s.packed is not None
        count = len(s.packed.sample_rows)
        for at in range(0, len(targets), SLICE):
            wanted = targets[at : at + SLICE]
            lines = _lines(s.lines, count + at, len(wanted), s.plan)
            self.scorer.run(self.model.logits(hidden[at : at + SLICE]), wanted, s.plan.logprobs, lines)

    def _batch(self, s: StepSlot, inputs: Tensor) -> ForwardBatch:
        assert s.plan is not None and s.packed is not None
        packed = s.packed
        rows = field(inputs, packed, "token_rows").long()
        positions = field(inputs, packed, "positions").long()
        return ForwardBatch(
            input_ids=self.tables.tokens[rows, positions].long(),
            positions=positions,
            slot_mapping=self.page_table.slots(rows, positions),
            sample_index=field(inputs, packed, "sample_index").long(),
            attention=s.attention.plan(_spans(s.plan), self.page_table),
        )

    def _upload_masks(self, s: StepSlot, masks: Masks) -> Tensor:
        """Fills and copies the masks of the constrained rows alone, then gives every row that samples its own or the
        one that allows everything. [S, words]."""
        assert s.plan is not None and s.packed is not None
        places = mask_places(s.plan)
        if masks:
            self.filler.fill([(constraint, places[row] - 1) for row, constraint in masks], s.masks_view)
        s.device_masks[1 : 1 + len(places)].copy_(s.host_masks[: len(places)], non_blocking=True)
        allowed = s.allowed[: len(s.packed.sample_rows)]
        torch.index_select(s.device_masks, 0, field(s.device_inputs, s.packed, "mask_places"), out=allowed)
        return allowed


def _line_words(plan: StepPlan) -> int:
    """How many words the step's log-probabilities take, as in `StepLogprobs`."""
    lines = sum([row.samples + len(row.targets) // 4 for row in plan.rows])
    return lines * (1 + 2 * plan.logprobs)


def _lines(words: Tensor, first: int, count: int, plan: StepPlan) -> Tensor:
    """`count` lines of a step from `first` on, [count, 1 + 2 * top]."""
    width = 1 + 2 * plan.logprobs
    return words[first * width : (first + count) * width].view(count, width)


def _spans(plan: StepPlan) -> list[Span]:
    spans = []
    offset = 0
    for row in plan.rows:
        spans.append(Span(row.row, offset, row.start, row.length))
        offset += row.length
    return spans
