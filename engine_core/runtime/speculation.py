"""Drafts on the device: their proposal, the inputs that verify them, and their acceptance."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import delta_rule
from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.reference import NgramRule, VerifyTokens
from tandem.engine_core.runtime.model_drafter import ModelDrafter
from tandem.engine_core.runtime.tables import DeviceTables


class Drafter(Protocol):
    """Proposes drafts: tokens that probably follow the known ones of a row."""

    def propose(self, rows: Tensor, num_drafts: int, sources: Tensor, needs: int) -> None:
        """Write the drafts of each row into the token table, after its known tokens, and -1 from the first missing one.

        rows: [B] int32, 0 for padding; num_drafts: number of tokens to write; a row has no more drafts than its
        `max_drafts`, and none for positions that are never computed; sources: [B] int32, written: FROM_CONTEXT or
        FROM_PREDICTION; needs: bits of `sampling.sampler` for the union of the rows' needs.
        """

    def note_accepted(self, rows: Tensor, counts: Tensor) -> None:
        """Note which drafts were accepted.

        rows: as for `propose`; counts: [B] int32, as in `kernels.speculation.reference.accept`.
        """


class VerifyKernels(NamedTuple):
    """Operations on drafts, with the semantics of `kernels.speculation.reference`."""

    propose_ngrams: Callable[[SamplingTables, Tensor, Tensor, int, Tensor, NgramRule], None]
    verify_inputs: Callable[[SamplingTables, Sequence[PageTable], Tensor, int, tuple[Tensor, Tensor]], VerifyTokens]
    accept: Callable[[SamplingTables, Tensor, int, Tensor, Tensor, Tensor], None]
    fold_accepted: Callable[[DeltaRuleState, Tensor, Tensor, Tensor], None]
    """Of recurrent layers: `kernels.reference.delta_rule.fold_accepted`."""


TORCH_KERNELS = VerifyKernels(
    reference.propose_ngrams, reference.verify_inputs, reference.accept, delta_rule.fold_accepted
)
"""The oracles, which run on a CPU."""


def triton_kernels(pdl: bool) -> VerifyKernels:
    """Return the Triton kernels. pdl: use programmatic dependent launch."""
    from tandem.engine_core.kernels.delta_rule.accepted import fold_accepted
    from tandem.engine_core.kernels.speculation.accept import accept
    from tandem.engine_core.kernels.speculation.ngram import propose_ngrams
    from tandem.engine_core.kernels.speculation.verify_inputs import verify_inputs

    return VerifyKernels(
        partial(propose_ngrams, pdl=pdl),
        partial(verify_inputs, pdl=pdl),
        partial(accept, pdl=pdl),
        partial(fold_accepted, pdl=pdl),
    )


class NgramDrafter:
    """Implement `Drafter` with the tokens that followed the last ones when they occurred before."""

    def __init__(self, tables: SamplingTables, predictions: Tensor, rule: NgramRule, kernels: VerifyKernels) -> None:
        """Store the tables. predictions: as in `kernels.speculation.reference.propose_ngrams`."""
        self.tables = tables
        self.predictions = predictions
        self.rule = rule
        self.kernels = kernels

    def propose(self, rows: Tensor, num_drafts: int, sources: Tensor, needs: int = 0) -> None:
        self.kernels.propose_ngrams(self.tables, self.predictions, rows, num_drafts, sources, self.rule)

    def note_accepted(self, rows: Tensor, counts: Tensor) -> None:
        return None


class Speculator:
    """Proposal and verification of drafts, over the device tables.

    The drafter runs at the beginning of the step that verifies its drafts. The copy of the previous step's results has
    been enqueued by then and overlaps with it. A step without drafts does not run the drafter.
    """

    def __init__(
        self,
        tables: SamplingTables,
        sources: Tensor,
        drafter: Drafter,
        kernels: VerifyKernels,
        model: ModelDrafter | None = None,
        states: DeltaRuleState | None = None,
    ) -> None:
        """Store the tables, the drafter and the kernels.

        sources: [max_rows] int32, scratch; model: the drafter, or that behind it, if it is a draft model; states: of
        all recurrent layers of the model that verifies, None if it has none.
        """
        self.tables = tables
        self.sources = sources
        self.drafter = drafter
        self.kernels = kernels
        self.model = model
        self.states = states

    @classmethod
    def of_ngrams(cls, tables: DeviceTables, rule: NgramRule, kernels: VerifyKernels) -> "Speculator":
        """Allocate the scratch of a speculator with n-gram drafts."""
        sources = torch.zeros(len(tables.tokens), dtype=torch.int32, device=tables.tokens.device)
        drafter = NgramDrafter(tables.sampling, tables.predictions, rule, kernels)
        return cls(tables.sampling, sources, drafter, kernels)

    def propose(self, rows: Tensor, num_drafts: int, needs: int = 0) -> None:
        """Write drafts of rows, [B] int32, into the token table; see `Drafter.propose`."""
        self.drafter.propose(rows, num_drafts, self.sources[: len(rows)], needs)

    def verify_inputs(
        self, rows: Tensor, num_drafts: int, page_tables: Sequence[PageTable], samples: tuple[Tensor, Tensor]
    ) -> VerifyTokens:
        """Return the tokens that verify the drafts in the token table.

        rows: [B] int32; samples: as in `kernels.speculation.reference.verify_inputs`.
        """
        return self.kernels.verify_inputs(self.tables, page_tables, rows, 1 + num_drafts, samples)

    def accept(self, rows: Tensor, num_drafts: int, sampled: Tensor) -> None:
        """Accept the drafts that equal the sampled tokens, and fold those into the states of recurrent layers.

        rows: [B] int32; sampled: [B * (1 + num_drafts) + B] int32, the sampled tokens, followed by the counts of the
        rows, which this writes.
        """
        count = len(rows) * (1 + num_drafts)
        sources = self.sources[: len(rows)]
        self.kernels.accept(self.tables, rows, 1 + num_drafts, sampled[:count], sources, sampled[count:])
        if self.states is not None:
            self.kernels.fold_accepted(self.states, rows, self.tables.lengths, sampled[count:])
        self.drafter.note_accepted(rows, sampled[count:])
