"""Forward passes out of device memory alone: what the graphs hold."""

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, PromptAttention
from tandem.engine_core.attention.triton import DecodeRows, MixedAttention, MixedRows, TritonDecode
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs
from tandem.engine_core.kernels.attention.paged_decode import choose_splits
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.models.registry import Model
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.tables import DeviceTables


class CudaForward:
    """Rows and positions of tokens in, logits or hidden states out; nothing comes from the host."""

    def __init__(self, model: Model, kv: KVStorage, tables: DeviceTables, page_size: int) -> None:
        self.model = model
        self.kv = kv
        self.tables = tables
        self.page_size = page_size

    @torch.inference_mode()
    def decode(self, rows: Tensor, positions: Tensor) -> Tensor:
        """rows, positions: [B] int32, one token each. Returns logits, [B, V]."""
        ids, places = self._inputs(rows, positions)
        plan = self._singles(rows, positions)
        batch = ForwardBatch(ids, positions, places, None, TritonDecode(), plan)
        return self.model.logits(self.model.forward(batch, self.kv))

    @torch.inference_mode()
    def mixed(
        self, rows: Tensor, positions: Tensor, shape: GraphBucket, prompts: PromptAttention, attended: Tensor
    ) -> Tensor:
        """rows, positions: [T] int32, laid out as the shape has it; prompts: planned for the rows of several tokens;
        attended: [T, heads, head_dim], as in `MixedRows`.

        Returns final hidden states, [T, hidden].
        """
        ids, places = self._inputs(rows, positions)
        plan = MixedRows(self._singles(rows[: shape.singles], positions[: shape.singles]), prompts, attended)
        return self.model.forward(ForwardBatch(ids, positions, places, None, MixedAttention(), plan), self.kv)

    def _inputs(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return decode_inputs(self.tables.tokens, self.tables.pages, rows, positions, self.page_size, pdl=True)

    def _singles(self, rows: Tensor, positions: Tensor) -> DecodeRows:
        device = torch.cuda.get_device_properties(rows.device)
        kv_heads, longest = self.kv.keys[0].shape[1], self.tables.tokens.shape[1]
        splits = choose_splits(max(1, len(rows)), kv_heads, device.multi_processor_count, longest)
        return DecodeRows(rows, positions, self.tables.pages, self.page_size, splits)
