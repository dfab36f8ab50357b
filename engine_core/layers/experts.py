"""Weights of the experts of one layer, on any device."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.moe.scales import SCALE_BLOCK
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.expert_weights import ExpertWeights, expert_names
from tandem.engine_core.layers.int4_experts import Int4Experts, empty_int4_experts
from tandem.engine_core.layers.quantized.eight_bit_linear import quantize_weight, row_scales
from tandem.engine_core.layers.quantized.quantized_linear import reject_overflow
from tandem.engine_core.loader.slots import SourceSlice, WeightSlot
from tandem.engine_core.quantization.scheme import EightBitScheme, Int4Scheme, Scheme


class Experts:
    """Weights in the model's dtype or in FP8.

    An expert computes down(activation(gate(x)) * up(x)). This implementation works on any device. It loops over the
    experts that are used, so it cannot be captured in a graph.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scales: Tensor | None,
        down_scales: Tensor | None,
        scheme: EightBitScheme | None,
        activation: Activation,
    ) -> None:
        """Store the weights.

        gate_up: [2 E, width, hidden], the gate of each expert before its up projection; down: [E, hidden, width]; in
        the model's dtype, or float8_e4m3fn with scales as in `kernels.moe.scales`.
        """
        self.parts = gate_up
        self.gate_up = gate_up.view(len(down), -1, gate_up.shape[2])
        self.down = down
        self.gate_up_scales = gate_up_scales
        self.down_scales = down_scales
        self.scheme = scheme
        self.activation = activation

    def needs_sorted(self, tokens: int, top_k: int) -> bool:
        """Implement `ExpertWeights.needs_sorted`."""
        return False

    def input_format(self, tokens: int, top_k: int) -> ActivationFormat | None:
        """Implement `ExpertWeights.input_format`."""
        return None

    def run(
        self,
        x: Tensor,
        routed: Routed,
        shared: SharedOutput | None = None,
        quantized: QuantizedActivation | None = None,
    ) -> Tensor:
        """Implement `ExpertWeights.run`."""
        given = (x, self.gate_up, self.down, routed, self.activation, self.gate_up_scales, self.down_scales)
        return moe.with_shared_expert(moe.run_experts(*given), shared)

    def slots(self, prefix: str, projections: tuple[str, str, str], shared: str = "") -> list[WeightSlot]:
        """Implement `ExpertWeights.slots`."""
        slots, (gate, up, down) = [], projections
        for expert, name in enumerate(expert_names(len(self.down), shared)):
            own = f"{prefix}{name}."
            slots += self._part_slots(f"{own}{gate}", self.parts, self.gate_up_scales, 2 * expert)
            slots += self._part_slots(f"{own}{up}", self.parts, self.gate_up_scales, 2 * expert + 1)
            slots += self._part_slots(f"{own}{down}", self.down, self.down_scales, expert)
        experts = len(self.down) - (shared != "")
        for name, values, scales in (
            (f"{prefix}experts.gate_up_proj", self.parts, self.gate_up_scales),
            (f"{prefix}experts.down_proj", self.down, self.down_scales),
        ):
            slots += self._fused_slots(name, values, scales, experts)
        return slots

    def _part_slots(self, name: str, values: Tensor, scales: Tensor | None, index: int) -> list[WeightSlot]:
        """List the slots of one projection of one expert. index: of the part in `values`."""
        shape = tuple(values.shape[1:])
        weight = f"{name}.weight"
        if self.scheme is None or scales is None:
            return [WeightSlot(weight, values, 0, index, 1, view=shape)]
        if self.scheme.from_floats:
            return [
                WeightSlot(weight, values, 0, index, 1, transform=quantize_weight, shapes=(shape,), view=shape),
                WeightSlot(weight, scales, 0, index, 1, transform=_row_scales(weight), shapes=(shape,), view=shape[:1]),
            ]
        found: Callable[[Tensor], Tensor]
        accepted: tuple[tuple[int, ...], ...]
        if self.scheme.block is not None:
            view, accepted, found = tuple(scales.shape[1:]), (tuple(scales.shape[1:]),), _unchanged
        else:
            outputs = shape[0]
            view, found = (outputs,), partial(_spread, length=outputs)
            accepted = ((), (1,), (1, 1)) if self.scheme.per_tensor else ((outputs, 1), (outputs,))
        slots = [WeightSlot(weight, values, 0, index, 1, dtypes=("F8_E4M3",), view=shape)]
        for last in self.scheme.scale_names:
            scale = f"{name}.{last}"
            transform = reject_overflow(scale, found, multiplied_by=self.scheme.max_value)
            slots.append(WeightSlot(scale, scales, 0, index, 1, transform=transform, shapes=accepted, view=view))
        return slots

    def _fused_slots(self, name: str, values: Tensor, scales: Tensor | None, experts: int) -> list[WeightSlot]:
        """List the slots of one projection of all experts: one, or one for each expert that is quantized while read.

        experts: number of those in the tensor.
        """
        parts, rows, inputs = len(values) // len(self.down), values.shape[1], values.shape[2]
        shape = (experts, parts * rows, inputs)
        if self.scheme is None or scales is None:
            return [WeightSlot(name, values, 0, 0, experts * parts, view=shape)]
        if not self.scheme.from_floats:
            return []
        check, slots = _row_scales(name), []
        for expert in range(experts):
            source = SourceSlice(shape, 0, expert, 1)
            for parameter, transform, view in ((values, quantize_weight, shape[1:]), (scales, check, shape[1:2])):
                region = (parameter, 0, expert * parts, parts, source)
                slots.append(WeightSlot(name, *region, transform=partial(_of_one, transform), view=view))
        return slots


def _of_one(transform: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
    """Transform the matrix of one expert. read: [1, outputs, inputs]."""
    return transform(read[0])


def _row_scales(name: str) -> Callable[[Tensor], Tensor]:
    return reject_overflow(name, row_scales, "weights")


def _unchanged(stored: Tensor) -> Tensor:
    return stored


def _spread(scale: Tensor, length: int) -> Tensor:
    return scale.reshape(-1).expand(length)


class TorchExpertMethod:
    """Expert method for any device."""

    def build(
        self,
        experts: int,
        hidden: int,
        width: int,
        activation: Activation,
        scheme: Scheme | None,
        context: BuildContext,
    ) -> ExpertWeights:
        """Implement `ExpertMethod.build`."""
        if isinstance(scheme, Int4Scheme):
            weights = empty_int4_experts(experts, hidden, width, scheme, context.device)
            return Int4Experts(*weights, scheme, activation)
        return Experts(*empty_experts(experts, hidden, width, scheme, context), fp8_scheme(scheme), activation)


def empty_experts(
    experts: int, hidden: int, width: int, scheme: Scheme | None, context: BuildContext
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Allocate uninitialized weights and scales; see `Experts`."""
    shapes, device = ((2 * experts, width, hidden), (experts, hidden, width)), context.device
    fp8 = fp8_scheme(scheme)
    if fp8 is None:
        gate_up, down = (torch.empty(shape, device=device, dtype=context.dtype) for shape in shapes)
        return gate_up, down, None, None
    gate_up, down = (torch.empty(shape, device=device, dtype=torch.float8_e4m3fn) for shape in shapes)
    blocks = fp8.block is not None
    gate_up_scales, down_scales = (
        torch.empty((parts, ceil_div(outputs, SCALE_BLOCK), ceil_div(inputs, SCALE_BLOCK)), device=device)
        if blocks
        else torch.empty((parts, outputs), device=device)
        for parts, outputs, inputs in shapes
    )
    return gate_up, down, gate_up_scales, down_scales


def fp8_scheme(scheme: Scheme | None) -> EightBitScheme | None:
    """Return the scheme of experts that have 8 bits, None for the model's dtype.

    Raises ConfigError for another quantization than FP8.
    """
    if scheme is None or (isinstance(scheme, EightBitScheme) and scheme.kind == "fp8"):
        return scheme
    raise ConfigError(
        f"experts in {scheme} are not supported (supported: 16 bits, 4 bits, and fp8 with scales of projections, of "
        "outputs or of blocks); serve the FP8 or the unquantized checkpoint"
    )
