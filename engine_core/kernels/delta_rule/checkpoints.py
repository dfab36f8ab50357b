"""Checkpoints of the state of recurrent layers: copies of rows at a position, in slots on the device.

A checkpoint at position p, a multiple of the ring's size, is the base of a row after p tokens and the last
`conv_width - 1` inputs of its convolution. It can be saved from a row while `base_length` of its tokens is p. A row
into which it is loaded has a ring of zeros, and continues at p as if it had computed the tokens before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Slots of checkpoints, and the rows that they are copied from and to.

    Copies are enqueued on the current stream and allocate nothing.
    """

    states: DeltaRuleState
    """Memory of all rows, [layers, rows, ...] as in `ModelStates.stacked`."""
    bases: Tensor
    """[layers, slots, value_heads, key_dim, value_dim] float32."""
    inputs: Tensor
    """[layers, slots, conv_width - 1, channels] in the model's dtype, ascending positions."""

    @classmethod
    def allocate(cls, shape: DeltaRuleShape, states: DeltaRuleState, slots: int) -> "Checkpoints":
        """Allocate the slots of checkpoints of these states."""
        base, columns = states.base, states.columns
        sizes = shape.conv_width - 1, shape.channels
        return cls(
            states,
            torch.empty(len(base), slots, *base.shape[2:], dtype=base.dtype, device=base.device),
            torch.empty(len(base), slots, *sizes, dtype=columns.dtype, device=base.device),
        )

    def save(self, row: int, slot: int, position: int) -> None:
        """Copy the state of a row at a position, where its base must end, to a slot."""
        self.bases[:, slot].copy_(self.states.base[:, row])
        for index, column in self._columns(position):
            self.inputs[:, slot, index].copy_(self.states.columns[:, row, column])

    def load(self, slot: int, row: int, position: int) -> None:
        """Copy a checkpoint of a position to a row, which continues from there."""
        states = self.states
        states.base[:, row].copy_(self.bases[:, slot])
        for tensor in (states.updates, states.keys, states.decays):
            tensor[:, row].zero_()
        for index, column in self._columns(position):
            states.columns[:, row, column].copy_(self.inputs[:, slot, index])

    def _columns(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield index in a checkpoint, and in the columns of a row, of each input before a position."""
        count = self.inputs.shape[2]
        for index in range(count):
            yield index, (position - count + index) % self.states.columns.shape[2]
