"""The forward pass of decode rows alone, out of device memory: what the graphs hold."""

import torch
from torch import Tensor

from engine_core.attention.base import ForwardBatch
from engine_core.attention.triton import DecodeRows, TritonDecode
from engine_core.kernels.decode_inputs import decode_inputs
from engine_core.kernels.paged_decode import choose_splits
from engine_core.kv_cache.storage import KVStorage
from engine_core.models.registry import Model
from engine_core.runtime.tables import DeviceTables


class DecodeForward:
    """Rows and positions in, logits out; nothing comes from the host."""

    def __init__(self, model: Model, kv: KVStorage, tables: DeviceTables, page_size: int) -> None:
        self.model = model
        self.kv = kv
        self.tables = tables
        self.page_size = page_size
        self.attention = TritonDecode()

    @torch.inference_mode()
    def __call__(self, rows: Tensor, positions: Tensor) -> Tensor:
        """rows, positions: [B] int32. Returns [B, V]."""
        tables = self.tables
        ids, places = decode_inputs(tables.tokens, tables.pages, rows, positions, self.page_size, pdl=True)
        device = torch.cuda.get_device_properties(rows.device)
        kv_heads, longest = self.kv.keys[0].shape[1], tables.tokens.shape[1]
        splits = choose_splits(len(rows), kv_heads, device.multi_processor_count, longest)
        plan = DecodeRows(rows, positions, tables.pages, self.page_size, splits)
        return self.model.logits(
            self.model.forward(ForwardBatch(ids, positions, places, None, self.attention, plan), self.kv)
        )
