"""Sampling as the runtime calls it, and the choice among its paths."""

from enum import Enum
from typing import Protocol

from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.protocol.params import SamplingParams

RANDOM, TRUNCATES, PENALIZES, BIASED, SUPPRESSES, MASKED = 1, 2, 4, 8, 16, 32
"""Bits of what sampling a row needs, kept on the host so that no step has to ask the device."""


class Mode(Enum):
    """A path of sampling, which also serves everything that the ones before it serve."""

    GREEDY = "greedy"
    """Every row takes its largest logit, whatever its parameters."""
    UNTRUNCATED = "untruncated"
    """Rows draw from the whole softmax at their temperatures."""
    FULL = "full"
    """Rows use all of their parameters."""
    MASKED = "masked"
    """Rows use all of their parameters under masks."""

    @classmethod
    def of(cls, needs: int) -> "Mode":
        """Return the cheapest path that serves all of the needs."""
        if not needs & ~RANDOM:
            return cls.UNTRUNCATED if needs else cls.GREEDY
        return cls.MASKED if needs & MASKED else cls.FULL


def needs_of(params: SamplingParams) -> int:
    """Return the bits of what sampling with a request's parameters needs."""
    return (
        RANDOM * (not params.greedy)
        | TRUNCATES * params.truncates
        | PENALIZES * params.penalizes
        | BIASED * bool(params.logit_bias_ids)
        | SUPPRESSES * (params.min_tokens > 0)
    )


class Sampler(Protocol):
    """Sampling of a token for every row of a batch."""

    def sample(self, batch: SamplingBatch) -> None:
        """Sample a token for each row of a batch.

        Write the tokens to `batch.sampled` and, at the position after each row's own, to the token table, and the
        rows' new lengths. A row whose logits hold NaN or +inf, or nothing but -inf, gets -1 in `batch.sampled` and 0 in
        the table, so that the next step can read an embedding there.
        """
