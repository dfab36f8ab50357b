"""Int4 weights of the experts of one layer, from GPTQ, AWQ and compressed-tensors, on any device."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.expert_weights import expert_names
from tandem.engine_core.layers.quantized.int4_slots import int4_slots
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.int4 import PER_WORD, unpack
from tandem.engine_core.quantization.scheme import Int4Scheme

_SYMMETRIC_ZERO = 8


class Int4Experts:
    """Int4 weights, dequantized for each expert that a step uses.

    It loops over these experts, so it cannot be captured in a graph.
    """

    def __init__(self, gate_up: Int4Weights, down: Int4Weights, scheme: Int4Scheme, activation: Activation) -> None:
        """Store the weights.

        gate_up: two parts of each expert, the gate first, from the hidden size to the width; down: one part of each.
        """
        self.gate_up = gate_up
        self.down = down
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

        def weights_of(expert: int) -> tuple[Tensor, Tensor]:
            halves = [dequantized(self.gate_up, 2 * expert + half, x.dtype) for half in (0, 1)]
            return torch.cat(halves), dequantized(self.down, expert, x.dtype)

        return moe.with_shared_expert(moe.apply_experts(x, weights_of, routed, self.activation), shared)

    def finish(self) -> None:
        """Convert the weights once they are loaded. Here: keep them as they are."""

    def slots(self, prefix: str, projections: tuple[str, str, str], shared: str = "") -> list[WeightSlot]:
        """Implement `ExpertWeights.slots`: three projections of each expert. Fused tensors of all do not exist."""
        slots, (gate, up, down) = [], projections
        checked = [
            torch.empty(len(weight.words), device=weight.words.device, dtype=torch.uint8)
            for weight in (self.gate_up, self.down)
        ]
        for expert, name in enumerate(expert_names(len(self.down.words), shared)):
            own = f"{prefix}{name}."
            slots += self._part_slots(f"{own}{gate}", self.gate_up, 2 * expert, checked[0])
            slots += self._part_slots(f"{own}{up}", self.gate_up, 2 * expert + 1, checked[0])
            slots += self._part_slots(f"{own}{down}", self.down, expert, checked[1])
        return slots

    def _part_slots(self, name: str, weight: Int4Weights, part: int, checked: Tensor) -> list[WeightSlot]:
        """List the slots of one part. checked: [parts], region of the groups, which are not kept."""
        words, (outputs, inputs) = weight.words[part], weight.part_shape
        scales, zeros = weight.scales[part].t(), weight.zeros[part].t()
        slots = int4_slots(name, 0, outputs, words, scales, zeros, self.scheme)
        slots = [replace(slot, on_filled=self.finish) if slot.parameter is words else slot for slot in slots]
        last = "weight_g_idx" if self.scheme.packing == "compressed-tensors" else "g_idx"
        check = partial(_check_groups, f"{name}.{last}", weight.group)
        return [
            *slots,
            WeightSlot(
                f"{name}.{last}",
                checked,
                0,
                part,
                1,
                transform=check,
                dtypes=("I32", "I64"),
                shapes=((inputs,),),
                is_optional=True,
            ),
        ]


def dequantized(weight: Int4Weights, part: int, dtype: torch.dtype) -> Tensor:
    """Return a part in the checkpoint's order of inputs, [outputs, inputs]."""
    scales, zeros = weight.scales[part].t(), weight.zeros[part].t()
    levels = unpack(weight.words[part]).to(torch.int16).view(*scales.shape, -1)
    return ((levels - zeros[:, :, None]) * scales[:, :, None]).flatten(1).to(dtype)


def _check_groups(name: str, group: int, stored: Tensor) -> Tensor:
    """Return a region for checked groups, [1]. Raises ConfigError if inputs are not in consecutive groups."""
    if not torch.equal(stored.int(), torch.arange(len(stored), device=stored.device, dtype=torch.int32) // group):
        raise _act_order(name)
    return torch.zeros(1, device=stored.device, dtype=torch.uint8)


def _act_order(name: str) -> ConfigError:
    return unsupported(f"{name}: experts with act-order, whose inputs have groups in any order, are not supported")


def empty_int4_experts(
    experts: int, hidden: int, width: int, scheme: Int4Scheme, device: torch.device
) -> tuple[Int4Weights, Int4Weights]:
    """Allocate the weights of `Int4Experts`.

    Zero points are initialized to 8, the value of symmetric checkpoints without them. Raises ConfigError for act-order,
    and for a shape that words and groups do not divide.
    """
    if scheme.ordered and scheme.group is not None:
        raise _act_order("quantization_config")
    return (
        _empty(2 * experts, width, hidden, scheme, device),
        _empty(experts, hidden, width, scheme, device),
    )


def _empty(parts: int, outputs: int, inputs: int, scheme: Int4Scheme, device: torch.device) -> Int4Weights:
    group = scheme.group or inputs
    if outputs % PER_WORD or inputs % PER_WORD or inputs % group:
        raise unsupported(
            f"the projections have {inputs} inputs and {outputs} outputs; int4 weights need multiples of {PER_WORD}, "
            f"and inputs in groups of {group}"
        )
    shape = parts, inputs // group, outputs
    return Int4Weights(
        torch.empty(parts, outputs, inputs // PER_WORD, device=device, dtype=torch.int32),
        torch.empty(shape, device=device),
        torch.full(shape, _SYMMETRIC_ZERO, device=device, dtype=torch.uint8),
    )
