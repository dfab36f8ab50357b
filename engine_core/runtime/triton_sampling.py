"""Sampling with the kernels of `sampling.device_sampler`."""

import torch
from torch import Tensor

from tandem.engine_core.runtime.staging import Packed
from tandem.engine_core.runtime.tables import DeviceTables, Mode, field
from tandem.engine_core.sampling.device_sampler import DeviceSampler


class TritonSampler:
    """The kernels, which read parameters from the tables themselves."""

    def __init__(self, tables: DeviceTables, kernels: DeviceSampler, nobody: Tensor) -> None:
        """nobody: [max_rows] int32 zeros, for steps that suppress no row's ends."""
        self.tables = tables
        self.kernels = kernels
        self.nobody = nobody

    def run(self, logits: Tensor, inputs: Tensor, packed: Packed, allowed: Tensor | None, out: Tensor) -> None:
        """As in `TokenSampler`."""
        rows = field(inputs, packed, "sample_rows")
        positions = field(inputs, packed, "sample_positions") - 1
        suppresses = "suppress" in packed.fields
        suppress = field(inputs, packed, "suppress") if suppresses else self.nobody[: len(out)]
        mode = Mode.FULL if suppresses or allowed is not None else self.tables.mode(packed)
        self.launch(mode, logits, rows, positions, suppress, out, allowed)

    def launch(
        self,
        mode: Mode,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        suppress: Tensor,
        out: Tensor,
        allowed: Tensor | None = None,
    ) -> None:
        """One of the three ways; the arguments are those of `DeviceSampler.full`."""
        call = {Mode.GREEDY: self.kernels.greedy, Mode.PLAIN: self.kernels.plain, Mode.FULL: self.kernels.full}[mode]
        call(logits, rows, positions, suppress, out, allowed)


def triton_sampler(tables: DeviceTables, vocab_size: int, max_rows: int) -> TritonSampler:
    """Allocates the kernels' scratch memory."""
    nobody = torch.zeros(max_rows, dtype=torch.int32, device=tables.tokens.device)
    parts = (tables.tokens, tables.ints, tables.floats, tables.bias, tables.suppressed)
    return TritonSampler(tables, DeviceSampler(*parts, vocab_size, max_rows), nobody)
