"""Sampling as the runtime calls it: from a step's packed inputs to tokens, in the device's own way."""

from typing import Protocol

from torch import Tensor

from tandem.engine_core.runtime.staging import Packed
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import sample


class TokenSampler(Protocol):
    """Draws a token for every row of a step that samples, and writes it into the token table."""

    def run(self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, out: Tensor) -> None:
        """logits: [S, V]; inputs: the packed step on the device; allowed: [S, ceil(V / 32)] int32 or None;
        out: [S] int32, written."""


class TorchSampler:
    """The oracle in torch, on any device."""

    def __init__(self, tables: DeviceTables) -> None:
        self.tables = tables

    def run(self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, out: Tensor) -> None:
        """As in `TokenSampler`."""
        out[:] = sample(logits, self.tables.sampling_rows(inputs, packed), allowed)
        self.tables.append(inputs, packed, out)
