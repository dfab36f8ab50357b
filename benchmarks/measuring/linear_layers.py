"""Linear maps of some layers of a model, run as in the engine but for attention."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.slots import WeightSlot

Name: TypeAlias = Literal["qkv", "o", "gate_up", "down", "head"]
Shape: TypeAlias = tuple[int, int]
"""Outputs and inputs of a map."""
PRODUCTS: tuple[Name, ...] = ("qkv", "o", "gate_up", "down")
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
            {name: context.linear_method.build(*shapes[name], False, context) for name in PRODUCTS}
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

    def step(self, update: Tensor, residual: Tensor) -> Tensor:
        """Run all products of a step, with what is between them but attention.

        update, residual: [rows, hidden].
        """
        x, stream = update, residual
        for layer in self.maps:
            for name in PRODUCTS:
                x, stream = self.run(name, layer, x, stream)
        return x if self.head is None else self.head.apply_normed(x, stream, self.norm)[0]

    def run(self, name: Name, layer: Mapping[Name, LinearWeights], x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Run one product of a layer, with what is between it and the one before.

        x: what the product before it returned. Returns the product and the residual stream.
        """
        rows = stream.shape[0]
        if name == "o":
            # Attention's output has as many elements as there are queries.
            inputs = self.shapes["o"][1]
            return layer["o"].apply(x.view(-1)[: rows * inputs].view(rows, inputs)), stream
        to = layer["down"].input_format(rows)
        if name == "down" and to is None:
            return layer["down"].apply(x), stream
        if name == "down":
            return layer["down"].apply_quantized(self.context.kernels.quantized_gate(x, Activation.SILU, to)), stream
        activation = Activation.SILU if name == "gate_up" and to is None else None
        return layer[name].apply_normed(x, stream, self.norm, activation)

    def inputs_of(self, name: Name, rows: int) -> tuple[Tensor, Tensor]:
        """Return inputs of a product for `run`, and a residual stream."""
        before: Mapping[Name, Name] = {"o": "qkv", "down": "gate_up"}
        width = self.shapes["qkv"][1]
        if name in before:
            width = self.shapes[before[name]][0]
        if name == "down" and self.maps[0]["down"].input_format(rows) is None:
            width //= 2
        return self._random(rows, width), self._random(rows, self.shapes["qkv"][1])

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device=self.context.device, dtype=self.context.dtype)
