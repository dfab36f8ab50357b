"""A draft model: a small model, whose samples are the drafts of a larger one (Leviathan et al., 2023).

Its keys and values have a pool of their own (`KVStorage.draft`), with the pages of the larger model's page tables. A
draft is sampled with the parameters of its row and the noise of its position, so it equals the token that the larger
model gets there as often as the two distributions allow.

Before the first draft of a step the model computes the newest token of a row and a few before it, since the last
accepted draft of the step before was never its input. So k drafts take k passes, and steps without drafts may leave out
some positions. More of them are computed as prompts are (`StepPlan.draft_spans`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine_core.attention.base import AttentionPlanner, ForwardBatch, Span
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.reference import DraftState, VerifyTokens
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.models.registry import Model
from tandem.engine_core.plan import catch_up_tokens
from tandem.engine_core.runtime.captured import DraftPromptGraph
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.runtime.verify_spans import verify_spans
from tandem.engine_core.sampling.sampler import Sampler


class DraftKernels(NamedTuple):
    """Operations on the state of a draft model, with the semantics of `kernels.speculation.reference`."""

    draft_inputs: Callable[
        [SamplingTables, Sequence[PageTable], DraftState, Tensor, int, tuple[Tensor, Tensor], Tensor, bool],
        VerifyTokens,
    ]
    write_drafts: Callable[[SamplingTables, DraftState, Tensor, Tensor, Tensor], None]
    note_accepted: Callable[[SamplingTables, DraftState, Tensor, Tensor], None]


TORCH_DRAFT_KERNELS = DraftKernels(reference.draft_inputs, reference.write_drafts, reference.note_accepted)
"""The oracles, which run on a CPU."""


def triton_draft_kernels(pdl: bool) -> DraftKernels:
    """Return the Triton kernels. pdl: use programmatic dependent launch."""
    from tandem.engine_core.kernels.speculation.draft_steps import draft_inputs, note_accepted, write_drafts

    inputs, accepted = partial(draft_inputs, pdl=pdl), partial(note_accepted, pdl=pdl)
    return DraftKernels(inputs, partial(write_drafts, pdl=pdl), accepted)


@dataclass(frozen=True, slots=True)
class DraftScratch:
    """Memory of a draft model that lives as long as the engine."""

    state: DraftState
    index: Tensor
    """[R] int64, index of the token of each row to sample from."""
    samples: Tensor
    """[3, R] int32: its row, its position and the sampled token; for steps without graphs."""

    @classmethod
    def allocate(cls, tables: DeviceTables) -> "DraftScratch":
        """Allocate the memory for all rows."""
        rows, device = len(tables.tokens), tables.tokens.device
        numbers = torch.zeros(5, rows, dtype=torch.int32, device=device)
        index = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(DraftState(numbers[0], numbers[1]), index, numbers[2:])


class ModelDrafter:
    """Implement `Drafter` with a draft model.

    Without graphs, `propose` runs the model. Graphs capture each pass by itself, since their number varies.
    """

    def __init__(
        self,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        sampler: Sampler,
        scratch: DraftScratch,
        kernels: DraftKernels,
        planners: Sequence[AttentionPlanner],
        vocab_size: int,
    ) -> None:
        """Store the parts.

        kv: pool of the draft model; planners: of the attention of each slot's steps; vocab_size: number of token ids of
        the larger model.
        """
        self.model = model
        self.kv = kv
        self.tables = tables
        self.sampler = sampler
        self.scratch = scratch
        self.kernels = kernels
        self.planners = planners
        self.vocab_size = vocab_size
        self.page_tables = tables.page_tables(kv)

    def propose(self, rows: Tensor, num_drafts: int, sources: Tensor, needs: int) -> None:
        sources.zero_()
        sample_rows, positions, sampled = self.scratch.samples[:, : len(rows)].unbind()
        index = self.scratch.index[: len(rows)]
        longest = self.tables.tokens.shape[1]
        for number in range(num_drafts):
            queries = 1 if number else catch_up_tokens(len(rows))
            tokens = self.inputs(rows, queries, (sample_rows, positions), index, number == 0)
            batch = ForwardBatch(
                input_ids=tokens.input_ids,
                positions=tokens.positions.long(),
                slot_mapping=tokens.slot_mapping.unbind(),
                sample_index=index,
                attention=self.planners[0].plan(verify_spans(tokens, queries), self.page_tables),
                has_drafts=True,
            )
            logits = self.logits(self.model.forward(batch, self.kv))
            given = logits, sample_rows, positions, sampled
            self.sampler.sample(SamplingBatch(*given, needs=needs, longest=longest, publish=False))
            self.write(rows, sample_rows, sampled)

    def inputs(
        self, rows: Tensor, queries: int, samples: tuple[Tensor, Tensor], index: Tensor, is_first: bool
    ) -> VerifyTokens:
        """Return the tokens of a pass, as in `kernels.speculation.reference.draft_inputs`."""
        given = self.tables.sampling, self.page_tables, self.scratch.state, rows, queries, samples, index, is_first
        tokens = self.kernels.draft_inputs(*given)
        self.known_ids(tokens.input_ids)
        return tokens

    def known_ids(self, ids: Tensor) -> Tensor:
        """Replace ids that only the larger model has by the last of the draft model, in place."""
        own = self.model.config.vocab_size
        return ids.clamp_(max=own - 1) if own < self.vocab_size else ids

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states, [S, vocab_size] in the model's dtype.

        Checkpoints of a family pad their vocabulary to different sizes. Ids that the draft model lacks get -inf, and
        those that only it has are left out. So the columns, and with them the noise of sampling, are those of the
        larger model. hidden: [S, hidden]; out: memory for the result, contiguous.
        """
        own = self.model.config.vocab_size
        if own == self.vocab_size:
            return self.model.logits(hidden, out)
        logits, common = self.model.logits(hidden), min(own, self.vocab_size)
        if out is None:
            out = logits.new_empty(len(logits), self.vocab_size)
        out[:, :common].copy_(logits[:, :common])
        out[:, common:].fill_(-torch.inf)
        return out

    def write(self, rows: Tensor, sample_rows: Tensor, sampled: Tensor) -> None:
        """Write the sampled drafts, as in `kernels.speculation.reference.write_drafts`."""
        self.kernels.write_drafts(self.tables.sampling, self.scratch.state, rows, sample_rows, sampled)

    def note_accepted(self, rows: Tensor, counts: Tensor) -> None:
        self.kernels.note_accepted(self.tables.sampling, self.scratch.state, rows, counts)

    def compute(
        self,
        slot: int,
        spans: Sequence[Span],
        rows: Tensor,
        positions: Tensor,
        ends: tuple[Tensor, Tensor],
        graph: DraftPromptGraph | None = None,
    ) -> None:
        """Compute keys and values of known tokens.

        spans: of the D tokens; rows, positions: [D] int32; ends: [N] int64 and [N] int32, row of each span and one past
        its last position: the model has the keys and values of all positions before; graph: one that holds the tokens,
        None if there is none.
        """
        if graph is not None:
            graph.replay(spans, rows, positions)
        else:
            self._compute(slot, spans, rows.long(), positions.long())
        self.scratch.state.lengths.index_copy_(0, *ends)

    def _compute(self, slot: int, spans: Sequence[Span], rows: Tensor, positions: Tensor) -> None:
        """Compute keys and values without a graph. rows, positions: [D] int64."""
        batch = ForwardBatch(
            input_ids=self.known_ids(self.tables.tokens[rows, positions].long()),
            positions=positions,
            slot_mapping=[table.slots(rows, positions) for table in self.page_tables],
            sample_index=rows[:1] * 0,
            attention=self.planners[slot].plan(spans, self.page_tables),
        )
        self.model.forward(batch, self.kv)
