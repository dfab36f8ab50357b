"""Scales of the keys and values of all layers, for a pool of 8-bit floats."""

import torch
from torch import Tensor

from tandem.engine_core.loader.slots import WeightSlot

KEY_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "qkv_proj.k_scale", "kv_scale")
"""Names behind `self_attn.` of a layer's scale of keys: of llm-compressor, vLLM, ModelOpt, compressed-tensors, ModelOpt
for fused projections, and AutoFP8, which has one scale for both."""
VALUE_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "qkv_proj.v_scale", "kv_scale")
"""Names of its scale of values, likewise."""


class KVScales:
    """Scales that divide keys and values when they are stored as 8-bit floats.

    Kernels read them from the device's memory. A scale of 0 is not known: neither the checkpoint nor a calibration has
    given it.
    """

    def __init__(self, values: Tensor, kv_heads: int) -> None:
        """Keep the scales.

        values: [layers, 2] float32, contiguous; kv_heads: of each layer.
        """
        self.values = values
        self.kv_heads = kv_heads
        self.layers = tuple(values.unbind(0))
        self._flat = values.view(-1)

    @classmethod
    def build(cls, layers: int, kv_heads: int, device: torch.device) -> "KVScales":
        """Allocate the scales of a number of layers, none of which is known."""
        return cls(torch.zeros(layers, 2, device=device), kv_heads)

    def slots(self, layer: int, prefix: str) -> list[WeightSlot]:
        """List the slots of one layer's scales.

        A checkpoint may hold one number for all heads or one for each, of which the largest is taken: a larger scale
        costs 8-bit floats no precision. prefix: of the layer's attention, such as "model.layers.0.self_attn.".
        """
        heads = self.kv_heads
        shapes = ((), (1,), (1, 1), (heads,), (heads, 1), (heads, 1, 1))
        return [
            WeightSlot(
                prefix + name, self._flat, 0, 2 * layer + kind, 1, shapes=shapes, is_optional=True,
                transform=lambda stored: stored.float().amax().view(1),
            )
            for kind, names in enumerate((KEY_NAMES, VALUE_NAMES))
            for name in names
        ]  # fmt: skip
