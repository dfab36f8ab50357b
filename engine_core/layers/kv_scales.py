"""FP8 KV cache scales of all layers."""

import torch
from torch import Tensor

from tandem.engine_core.loader.slots import WeightSlot

KEY_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "qkv_proj.k_scale", "kv_scale")
"""Names, after a layer's `self_attn.`, of the key scale: of llm-compressor, vLLM, ModelOpt, compressed-tensors,
ModelOpt for fused projections, and AutoFP8, which has one scale for both."""
VALUE_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "qkv_proj.v_scale", "kv_scale")
"""Names of the value scale, likewise."""


class KVScales:
    """Scales that divide keys and values when they are quantized to FP8.

    Kernels read them from device memory. 0 means unknown: neither in the checkpoint nor calibrated.
    """

    def __init__(self, values: Tensor, kv_heads: int) -> None:
        """Store the scales.

        values: [layers, 2] float32, contiguous; kv_heads: of each layer.
        """
        self.values = values
        self.kv_heads = kv_heads
        self.layers = tuple(values.unbind(0))
        self._flat = values.view(-1)

    @classmethod
    def build(cls, layers: int, kv_heads: int, device: torch.device) -> "KVScales":
        """Allocate the scales of a number of layers, all unknown."""
        return cls(torch.zeros(layers, 2, device=device), kv_heads)

    def slots(self, layer: int, prefix: str) -> list[WeightSlot]:
        """List the slots of one layer's scales.

        A checkpoint may hold one per layer or one per head. The maximum is used, since a larger scale does not make FP8
        less precise. prefix: of the layer's attention, such as "model.layers.0.self_attn.".
        """
        heads = self.kv_heads
        shapes = ((), (1,), (1, 1), (heads,), (heads, 1), (heads, 1, 1))
        return [
            WeightSlot(
                prefix + name,
                self._flat,
                0,
                2 * layer + kind,
                1,
                shapes=shapes,
                is_optional=True,
                transform=lambda stored: stored.float().amax().view(1),
            )
            for kind, names in enumerate((KEY_NAMES, VALUE_NAMES))
            for name in names
        ]
