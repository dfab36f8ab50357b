"""Linear layers of a model, run as in the engine without attention."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot

Name: TypeAlias = Literal["qkv", "o", "gate_up", "down", "head"]
Shape: TypeAlias = tuple[int, int]
"""Outputs and inputs."""
Update: TypeAlias = Tensor | QuantizedActivation
"""Output of a matmul; input of `down` if the gated activation quantizes."""
LINEAR_NAMES: tuple[Name, ...] = ("qkv", "o", "gate_up", "down")
"""Linear layers of a block, in order."""
EPS = 1e-5


class LinearLayers:
    """Linear layers of several blocks in one weight format, and optionally the LM head."""

    def __init__(
        self,
        shapes: Mapping[Name, Shape],
        maps: list[dict[Name, LinearWeights]],
        head: LinearWeights | None,
        norm: Norm,
        context: BuildContext,
    ) -> None:
        """Initialize from the linear layers of each block; see `build`."""
        self.shapes = shapes
        self.maps = maps
        self.head = head
        self.norm = norm
        self.context = context

    @classmethod
    def build(cls, shapes: Mapping[Name, Shape], copies: int, context: BuildContext) -> "LinearLayers":
        """Allocate the weights of `copies` blocks without filling them.

        shapes: of a block's linear layers, and of the head, which follows the last block.
        """
        maps = [{name: context.linear(name, *shapes[name]) for name in LINEAR_NAMES} for _ in range(copies)]
        head = context.linear("lm_head", *shapes["head"]) if "head" in shapes else None
        weight = torch.ones(shapes["qkv"][1], device=context.device, dtype=context.dtype)
        return cls(shapes, maps, head, RMSNorm(weight, EPS, context.kernels), context)

    def weight_slots(self) -> list[WeightSlot]:
        """Implement `Loadable.weight_slots`."""
        found = [
            slot
            for index, layer in enumerate(self.maps)
            for name, linear in layer.items()
            for slot in linear.slots(f"{index}.", name)
        ]
        return found + (self.head.slots("", "head") if self.head is not None else [])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters."""
        parameters = {slot.parameter.data_ptr(): slot.parameter.nbytes for slot in self.weight_slots()}
        return sum(parameters.values())

    @property
    def linears(self) -> list[LinearWeights]:
        """All linear layers."""
        return [linear for layer in self.maps for linear in layer.values()] + ([self.head] if self.head else [])

    def step(self, update: Update, residual: Tensor) -> Update:
        """Run all matmuls of a step with the operations between them, except attention.

        update, residual: [rows, hidden].
        """
        x: Update = update
        stream = residual
        for layer in self.maps:
            for name in LINEAR_NAMES:
                x, stream = self.run(name, layer, x, stream)
        if self.head is None:
            return x
        assert isinstance(x, Tensor)
        return self.head.apply_normed(x, stream, self.norm)[0]

    def run(self, name: Name, layer: Mapping[Name, LinearWeights], x: Update, stream: Tensor) -> tuple[Update, Tensor]:
        """Run one matmul of a block, with the operations since the previous one.

        x: output of the previous matmul. Returns the output and the residual stream.
        """
        rows = stream.shape[0]
        if isinstance(x, QuantizedActivation):
            return layer["down"].apply_quantized(x), stream
        if name == "o":
            # Attention's output has the shape of the queries.
            inputs = self.shapes["o"][1]
            return layer["o"].apply(x.view(-1)[: rows * inputs].view(rows, inputs)), stream
        if name == "down":
            return layer["down"].apply(x), stream
        to = layer["down"].input_format(rows)
        if name == "gate_up" and to is not None:
            return layer["gate_up"].apply_normed_quantized(x, stream, self.norm, Activation.SILU, to)
        return layer[name].apply_normed(x, stream, self.norm, Activation.SILU if name == "gate_up" else None)

    def inputs_of(self, name: Name, rows: int) -> tuple[Update, Tensor]:
        """Return random inputs of a matmul for `run`, and a residual stream."""
        before: Mapping[Name, Name] = {"o": "qkv", "down": "gate_up"}
        width = self.shapes["qkv"][1]
        if name in before:
            width = self.shapes[before[name]][0]
        x, stream = self._random(rows, width), self._random(rows, self.shapes["qkv"][1])
        if name != "down":
            return x, stream
        to = self.maps[0]["down"].input_format(rows)
        hidden = x[:, : width // 2].contiguous()
        return hidden if to is None else self.context.kernels.quantize(hidden, to), stream

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device=self.context.device, dtype=self.context.dtype)
