"""Sampler interface, and the choice of its mode."""

from enum import Enum
from typing import Protocol

from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.protocol.params import SamplingParams

RANDOM, TRUNCATES, PENALIZES, BIASED, SUPPRESSES, MASKED = 1, 2, 4, 8, 16, 32
"""Bits of the features that a row needs, kept on the host so that no step has to read the device."""


class Mode(Enum):
    """Sampling mode; each also supports the needs of the previous ones."""

    GREEDY = "greedy"
    """Every row takes the argmax, whatever its parameters."""
    UNTRUNCATED = "untruncated"
    """Rows draw from the whole softmax at their temperatures."""
    FULL = "full"
    """Rows use all of their parameters."""
    MASKED = "masked"
    """Rows use all of their parameters, with masks."""

    @classmethod
    def of(cls, needs: int) -> "Mode":
        """Return the cheapest mode that supports all needs."""
        if not needs & ~RANDOM:
            return cls.UNTRUNCATED if needs else cls.GREEDY
        return cls.MASKED if needs & MASKED else cls.FULL


def needs_of(params: SamplingParams) -> int:
    """Return the need bits of a request's parameters."""
    return (
        RANDOM * (not params.greedy)
        | TRUNCATES * params.truncates
        | PENALIZES * params.penalizes
        | BIASED * bool(params.logit_bias_ids)
        | SUPPRESSES * (params.min_tokens > 0)
    )


class Sampler(Protocol):
    """Samples a token for every row of a batch."""

    def sample(self, batch: SamplingBatch) -> None:
        """Sample a token for each row of a batch.

        Write the tokens to `batch.sampled` and, unless `batch.publish` is False, at the position after each row's own
        to the token table, and the rows' new lengths. A row whose logits contain NaN or +inf, or -inf only, gets -1 in
        `batch.sampled` and 0 in the table, so that the next step can read an embedding there.
        """

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        """Sample in a mode that supports the needs of all rows; those of the batch are not read."""
