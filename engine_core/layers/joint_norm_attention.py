"""Self-attention with one norm over all queries and one over all keys, as in OLMo 2 and OLMoE."""

from typing import Self

import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.layers.attention import Attention, attend_and_project
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.layer_state import LayerState, PagedKV, StepContext
from tandem.engine_core.layers.linear import Norm
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.model_config import ModelConfig


class JointNormAttention(Attention):
    """Self-attention with norms over the heads of all queries, and of all keys.

    Queries, keys and values may then be clipped.
    """

    clip: float | None = None
    """Maximum absolute value of queries, keys and values; None: they are not clipped."""

    @classmethod
    def build(
        cls, config: ModelConfig, layer: LayerAttention, prefix: str, context: BuildContext, unit_offset: bool = False
    ) -> Self:
        """Extend `Attention.build` by norms over the heads of all queries, and of all keys."""
        built = super().build(config, layer, prefix, context, unit_offset)
        built.q_norm, built.k_norm = (
            RMSNorm.build(heads * config.head_dim, config.rms_norm_eps, context, unit_offset)
            for heads in (config.heads, config.kv_heads)
        )
        built.clip = config.qkv_clip
        return built

    def __call__(
        self, update: Tensor, residual: Tensor | None, norm: Norm, step: StepContext, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Implement `Attention.__call__`."""
        projected, residual = self.qkv.adapted(step.batch.adapters).apply_normed(update, residual, norm)
        return self._attend(projected, step, state), residual

    def attend_stream(self, stream: Tensor, step: StepContext, state: LayerState) -> Tensor:
        """Return the update of a stream that is not normalized, both [T, hidden]."""
        return self._attend(self.qkv.adapted(step.batch.adapters).apply(stream), step, state)

    def _attend(self, projected: Tensor, step: StepContext, state: LayerState) -> Tensor:
        """Return the update, [T, hidden]. projected: queries, keys and values, [T, width + 2 * kv_width]."""
        assert self.q_norm is not None and self.k_norm is not None and isinstance(state, PagedKV)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, _ = self.q_norm(projected[:, :width].contiguous(), None)
        key, _ = self.k_norm(projected[:, width : width + kv_width].contiguous(), None)
        qkv = torch.cat((query, key, projected[:, width + kv_width :]), dim=-1)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        qkv = qkv.view(len(projected), -1, self.head_dim)
        rotation = Rotation(*step.rotary[self.layer.rotary], step.batch.slot_mapping[self.layer.group])
        given = (qkv, rotation, step.batch, state.keys, state.values, self.layer, self.output, self.kernels)
        return attend_and_project(*given, state.scales)
