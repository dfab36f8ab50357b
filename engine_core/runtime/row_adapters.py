"""The adapters of a step's tokens, by the rows of the device's tables."""

from torch import Tensor

from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables
from tandem.engine_core.layers.lora_linear import LoraSlots

_SLOT = INT_COLUMNS.index("adapter_slot")


class RowAdapters:
    """Look-up of the adapters of tokens. It reads device memory only, so graphs can capture it."""

    def __init__(self, tables: SamplingTables, lora: LoraSlots) -> None:
        self.lora = lora
        self._slots = tables.ints[:, _SLOT]

    def of(self, rows: Tensor) -> AdapterTokens:
        """Return the adapters of tokens. rows: [T] int32, row of each token; 0 for padding."""
        return self.lora.group_tokens(self._slots.index_select(0, rows).int(), self.lora.max_slots)
