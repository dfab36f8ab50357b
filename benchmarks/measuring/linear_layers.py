"""Linear maps of some layers of a model, run as in the engine but for attention."""

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
"""Outputs and inputs of a map."""
Update: TypeAlias = Tensor | QuantizedActivation
"""What a product returns; before the last of a layer, what the gate rounded."""
LINEAR_NAMES: tuple[Name, ...] = ("qkv", "o", "gate_up", "down")
"""The maps of a layer, in order."""
EPS = 1e-5


class LinearLayers:
    """Linear maps of some layers in one format, and the output head if there is one."""

    def __init__(
        self, shapes: Mapping[Name, Shape], maps: list[dict[Name, LinearWeights]], head: LinearWeights | None,
        norm: Norm, context: BuildContext,
    ) -> None:  # fmt: skip
        """Keep the maps of each layer; see `build`."""
        self.shapes = shapes
        self.maps = maps
        self.head = head
        self.norm = norm
        self.context = context

    @classmethod
    def build(cls, shapes: Mapping[Name, Shape], copies: int, context: BuildContext) -> "LinearLayers":
        """Allocate layers whose weights are not filled yet.

        shapes: of the maps of a layer, and of the head, which is behind the last layer and in the format of heads.
        """
        maps = [
            {name: context.linear_method.build(*shapes[name], False, context) for name in LINEAR_NAMES}
            for _ in range(copies)
        ]
        head = context.head_method.build(*shapes["head"], False, context) if "head" in shapes else None
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
        """Bytes that the parameters take."""
        parameters = {slot.parameter.data_ptr(): slot.parameter.nbytes for slot in self.weight_slots()}
        return sum(parameters.values())

    @property
    def linears(self) -> list[LinearWeights]:
        """All maps."""
        return [linear for layer in self.maps for linear in layer.values()] + ([self.head] if self.head else [])

    def step(self, update: Update, residual: Tensor) -> Update:
        """Run all products of a step, with what is between them but attention.

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
        """Run one product of a layer, with what is between it and the one before.

        x: what the product before it returned. Returns the product and the residual stream.
        """
        rows = stream.shape[0]
        if isinstance(x, QuantizedActivation):
            return layer["down"].apply_quantized(x), stream
        if name == "o":
            # Attention's output has as many elements as there are queries.
            inputs = self.shapes["o"][1]
            return layer["o"].apply(x.view(-1)[: rows * inputs].view(rows, inputs)), stream
        if name == "down":
            return layer["down"].apply(x), stream
        to = layer["down"].input_format(rows)
        if name == "gate_up" and to is not None:
            return layer["gate_up"].apply_normed_quantized(x, stream, self.norm, Activation.SILU, to)
        return layer[name].apply_normed(x, stream, self.norm, Activation.SILU if name == "gate_up" else None)

    def inputs_of(self, name: Name, rows: int) -> tuple[Update, Tensor]:
        """Return inputs of a product for `run`, and a residual stream."""
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
