"""Self-attention of one layer, with grouped key and value heads."""

import torch
from torch import Tensor

from engine_core.attention.base import ForwardBatch
from engine_core.kernels.reference import rope_and_kv_write
from engine_core.layers.linear import Linear, LinearMethod
from engine_core.loader.slots import WeightSlot
from engine_core.models.config import ModelConfig


class Attention:
    """Fused query, key and value projection, rotary embedding, paged attention, output projection."""

    def __init__(self, qkv: Linear, output: Linear, heads: int, kv_heads: int, head_dim: int) -> None:
        self.qkv = qkv
        self.output = output
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    @classmethod
    def build(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, method: LinearMethod) -> "Attention":
        """Unfilled."""
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        width, bias = (heads + 2 * kv_heads) * head_dim, config.attention_bias
        qkv = Linear.build(width, config.hidden_size, bias, device, dtype, method)
        output = Linear.build(config.hidden_size, heads * head_dim, bias, device, dtype, method)
        return cls(qkv, output, heads, kv_heads, head_dim)

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, keys: Tensor, values: Tensor
    ) -> Tensor:
        """x: [T, hidden]; rotary: of the batch's positions; keys, values: the layer's pool, written at
        `batch.kv_index`. Returns [T, hidden]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query = rope_and_kv_write(qkv, *rotary, batch.kv_index, keys, values)
        attended = batch.backend.run(batch.plan, query, keys, values, self.scale)
        return self.output(attended.view(x.shape[0], -1))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Where checkpoint tensors go, under the names of Hugging Face's Llama."""
        kv_width = self.kv_heads * self.head_dim
        parts = {"q_proj": self.heads * self.head_dim, "k_proj": kv_width, "v_proj": kv_width}
        return self.qkv.slots(prefix, "qkv_proj", parts) | self.output.slots(prefix, "o_proj")
