"""Drafts on the device: their proposal, the inputs that verify them, and their acceptance."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.reference import NgramRule, VerifyTokens
from tandem.engine_core.runtime.tables import DeviceTables


class VerifyKernels(NamedTuple):
    """Operations on drafts, with the semantics of `kernels.speculation.reference`."""

    propose_ngrams: Callable[[SamplingTables, Tensor, Tensor, int, Tensor, NgramRule], None]
    verify_inputs: Callable[[SamplingTables, Sequence[PageTable], Tensor, int, tuple[Tensor, Tensor]], VerifyTokens]
    accept: Callable[[SamplingTables, Tensor, int, Tensor, Tensor, Tensor], None]


TORCH_KERNELS = VerifyKernels(reference.propose_ngrams, reference.verify_inputs, reference.accept)
"""The oracles, which run on a CPU."""


def triton_kernels(pdl: bool) -> VerifyKernels:
    """Return the Triton kernels. pdl: use programmatic dependent launch."""
    from tandem.engine_core.kernels.speculation.accept import accept
    from tandem.engine_core.kernels.speculation.ngram import propose_ngrams
    from tandem.engine_core.kernels.speculation.verify_inputs import verify_inputs

    return VerifyKernels(partial(propose_ngrams, pdl=pdl), partial(verify_inputs, pdl=pdl), partial(accept, pdl=pdl))


class Speculator:
    """Proposal and verification of drafts, over the device tables.

    The drafter runs at the beginning of the step that verifies its drafts. The copy of the previous step's results has
    been enqueued by then and overlaps with it. A step without drafts does not run the drafter.
    """

    def __init__(
        self, tables: SamplingTables, predictions: Tensor, sources: Tensor, rule: NgramRule, kernels: VerifyKernels
    ) -> None:
        """Store the tables and the kernels.

        predictions: as in `propose_ngrams`; sources: [max_rows] int32, scratch.
        """
        self.tables = tables
        self.predictions = predictions
        self.sources = sources
        self.rule = rule
        self.kernels = kernels

    @classmethod
    def allocate(cls, tables: DeviceTables, rule: NgramRule, kernels: VerifyKernels) -> "Speculator":
        """Allocate the scratch."""
        sources = torch.zeros(len(tables.tokens), dtype=torch.int32, device=tables.tokens.device)
        return cls(tables.sampling, tables.predictions, sources, rule, kernels)

    def begin(
        self, rows: Tensor, num_drafts: int, page_tables: Sequence[PageTable], samples: tuple[Tensor, Tensor]
    ) -> VerifyTokens:
        """Propose drafts, and return the tokens that verify them.

        rows: [B] int32; samples: as in `kernels.speculation.reference.verify_inputs`.
        """
        self.kernels.propose_ngrams(
            self.tables, self.predictions, rows, num_drafts, self.sources[: len(rows)], self.rule
        )
        return self.kernels.verify_inputs(self.tables, page_tables, rows, 1 + num_drafts, samples)

    def accept(self, rows: Tensor, num_drafts: int, sampled: Tensor) -> None:
        """Accept the drafts that equal the sampled tokens.

        rows: [B] int32; sampled: [B * (1 + num_drafts) + B] int32, the sampled tokens, followed by the counts of the
        rows, which this writes.
        """
        count = len(rows) * (1 + num_drafts)
        sources = self.sources[: len(rows)]
        self.kernels.accept(self.tables, rows, 1 + num_drafts, sampled[:count], sources, sampled[count:])
