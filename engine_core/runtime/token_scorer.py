"""Log-probabilities as the runtime calls for them, in the device's own way."""

from typing import Protocol

from torch import Tensor

from tandem.engine_core.kernels.reference_logprobs import logprob_lines

SLICE = 256
"""Most prompt positions whose logits exist at once."""


class TokenScorer(Protocol):
    """Looks one token a row up in the row's log-softmax, and the row's most probable tokens."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, lines: Tensor) -> None:
        """logits: [S, V]; chosen: [S] int32; lines: [S, 1 + 2 * top] int32, written as in `logprob_lines`."""


class TorchScorer:
    """The oracle, on any device."""

    def run(self, logits: Tensor, chosen: Tensor, top: int, lines: Tensor) -> None:
        """As in `TokenScorer`."""
        lines.copy_(logprob_lines(logits, chosen, top))
