"""Low-rank updates of a linear layer by the adapters of a step's tokens."""

from dataclasses import dataclass

from torch import Tensor

from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens


@dataclass(frozen=True, slots=True)
class LoraUpdates:
    """The updates of one projection. Fields are the arguments of `kernels.reference.lora.add_lora`."""

    tokens: AdapterTokens
    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: tuple[int, ...]
