"""Executes step plans on a device: `contracts.Runtime`, written once for CUDA and CPU."""

import numpy as np
import torch
from torch import Tensor

from engine_core.attention.base import AttentionBackend, ForwardBatch, Span
from engine_core.contracts import Masks
from engine_core.kv_cache.storage import KVStorage
from engine_core.models.registry import Model
from engine_core.plan import StepPlan
from engine_core.runtime.device import Device
from engine_core.runtime.slots import StepSlot
from engine_core.runtime.staging import Packed, pack
from engine_core.runtime.tables import DeviceTables, field
from engine_core.sampling.sampler import sample


class TorchRuntime:
    """One model on one device, with as many slots as the pipeline is deep."""

    def __init__(
        self,
        device: Device,
        model: Model,
        attention: AttentionBackend,
        kv: KVStorage,
        tables: DeviceTables,
        slots: list[StepSlot],
        page_size: int,
    ) -> None:
        self.device = device
        self.model = model
        self.attention = attention
        self.kv = kv
        self.tables = tables
        self.slots = slots
        self.page_size = page_size

    @torch.inference_mode()
    def launch(self, slot: int, plan: StepPlan) -> None:
        """Enqueues one copy to the device, the news for the tables, and the forward pass."""
        s = self.slots[slot]
        max_len, pages_per_row = self.tables.tokens.shape[1], self.tables.pages.shape[1]
        packed = pack(plan, max_len, pages_per_row, s.inputs_view)
        self.tables.note(plan.admitted)
        s.plan, s.packed = plan, packed
        with self.device.compute():
            inputs = s.device_inputs[: packed.total]
            inputs.copy_(s.host_inputs[: packed.total], non_blocking=True)
            self.tables.apply(inputs, packed)
            hidden = self.model.forward(self._batch(plan, inputs, packed), self.kv)
            s.logits = self.model.logits(hidden) if len(hidden) else hidden

    @torch.inference_mode()
    def sample(self, slot: int, masks: Masks | None) -> None:
        """Enqueues sampling, the write of the tokens into the table, and their copy to the host (I3)."""
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None and s.logits is not None, f"slot {slot} was not launched"
        count = len(s.logits)
        if count == 0:
            return
        with self.device.compute():
            allowed = self._upload_masks(s, masks) if masks is not None else None
            rows = self.tables.sampling_rows(s.device_inputs, s.packed)
            s.sampled[:count] = sample(s.logits, rows, allowed)
            self.tables.append(s.device_inputs, s.packed, s.sampled[:count])
            s.sampling_done.record()
        with self.device.copy():
            s.sampling_done.wait()
            s.results[:count].copy_(s.sampled[:count], non_blocking=True)
            s.copy_done.record()
        s.logits = None

    def collect(self, slot: int) -> list[int]:
        s = self.slots[slot]
        assert s.plan is not None and s.packed is not None, f"slot {slot} was not launched"
        s.copy_done.synchronize()
        tokens: list[int] = s.results[: len(s.packed.sample_rows)].tolist()
        rows, s.plan, s.packed = s.plan.rows, None, None
        if len(tokens) == len(rows):
            return tokens
        sampled = iter(tokens)
        return [next(sampled) if row.samples else -1 for row in rows]

    def synchronize(self) -> None:
        self.device.synchronize()

    def _batch(self, plan: StepPlan, inputs: Tensor, packed: Packed) -> ForwardBatch:
        rows = field(inputs, packed, "token_rows").long()
        positions = field(inputs, packed, "positions").long()
        places = self.tables.pages[rows, positions // self.page_size].long() * self.page_size
        used = -(-packed.longest // self.page_size)
        pages = self.tables.pages[:, :used][field(inputs, packed, "rows").long()]
        return ForwardBatch(
            input_ids=self.tables.tokens[rows, positions].long(),
            positions=positions,
            kv_index=places + positions % self.page_size,
            sample_index=field(inputs, packed, "sample_index").long(),
            backend=self.attention,
            plan=self.attention.plan(_spans(plan), pages, self.page_size),
        )

    def _upload_masks(self, s: StepSlot, masks: Masks) -> Tensor:
        assert s.plan is not None
        wanted = [mask for mask, row in zip(masks, s.plan.rows, strict=True) if row.samples]
        view = s.host_masks.numpy().view(np.uint8)
        for index, mask in enumerate(wanted):
            if mask is None:
                view[index] = 0xFF
            else:
                view[index] = 0
                view[index, : len(mask)] = np.frombuffer(mask, dtype=np.uint8)
        device_masks = s.device_masks[: len(wanted)]
        device_masks.copy_(s.host_masks[: len(wanted)], non_blocking=True)
        return device_masks


def _spans(plan: StepPlan) -> list[Span]:
    spans = []
    offset = 0
    for row in plan.rows:
        spans.append(Span(offset, row.start, row.length))
        offset += row.length
    return spans
