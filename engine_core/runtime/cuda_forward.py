"""Forward passes that read only device memory, as graphs capture them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, PromptStep
from tandem.engine_core.attention.triton import DecodeStep, MixedStep
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs
from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_splits
from tandem.engine_core.kernels.attention.extra_splits import (
    assign_extra_splits,
    choose_extra_splits,
    max_len_without_extra_splits,
)
from tandem.engine_core.kernels.attention.table_updates import update_tables
from tandem.engine_core.kernels.delta_rule.state import TokenRows
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.sampling.gather import gather_samples
from tandem.engine_core.kv_cache.storage import KVStorage
from tandem.engine_core.models.registry import Model
from tandem.engine_core.plan import catch_up_tokens
from tandem.engine_core.runtime.captured import SampleBuffers
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.graphs import MAX_PROMPTS
from tandem.engine_core.runtime.model_drafter import ModelDrafter
from tandem.engine_core.runtime.row_adapters import RowAdapters
from tandem.engine_core.runtime.speculation import Speculator
from tandem.engine_core.runtime.tables import DeviceTables


class CudaForward:
    """Forward passes from rows and positions of tokens to logits or hidden states.

    Nothing comes from the host.
    """

    def __init__(
        self,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        page_tables: Sequence[PageTable],
        gpu: GpuTraits,
        speculator: Speculator | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Keep a model and the memory that its forward passes read.

        page_tables: of the tables' pages in the KV storage, by KV group; speculator: None if no step verifies drafts;
        adapters: None if no row has one.
        """
        self.model = model
        self.kv = kv
        self.tables = tables
        self.page_tables = page_tables
        self.gpu = gpu
        self.speculator = speculator
        self.adapters = adapters

    @torch.inference_mode()
    def decode(self, rows: Tensor, positions: Tensor, samples: SampleBuffers, has_long_rows: bool = True) -> Tensor:
        """Compute one token per row and return its logits, [B, V], in `samples.logits`.

        samples: B slots, written; has_long_rows: False to launch no spare programs, which rows of at most
        `max_short_len` positions do not need. rows, positions: [B] int32; negative positions are replaced by the
        positions of the rows' newest tokens.
        """
        return self._decode(rows, positions, samples, has_long_rows, None)

    @torch.inference_mode()
    def decode_adapted(
        self, rows: Tensor, positions: Tensor, samples: SampleBuffers, has_long_rows: bool = True
    ) -> Tensor:
        """Do what `decode` does, with the adapters of the rows."""
        return self._decode(rows, positions, samples, has_long_rows, self._adapters(rows))

    def _decode(
        self,
        rows: Tensor,
        positions: Tensor,
        samples: SampleBuffers,
        has_long_rows: bool,
        adapters: AdapterTokens | None,
    ) -> Tensor:
        input_ids, slot_mapping = self._inputs(rows, positions, (samples.rows, samples.positions))
        step = self._decode_step(rows, positions, has_long_rows)
        tokens = TokenRows(samples.rows, positions, len(rows)) if self.kv.recurrent else None
        given = input_ids, positions, slot_mapping.unbind(), None, step, step, rows, tokens
        batch = ForwardBatch(*given, adapters=adapters)
        return self.model.logits(self.model.forward(batch, self.kv), samples.logits)

    @torch.inference_mode()
    def verify(self, rows: Tensor, num_drafts: int, samples: SampleBuffers) -> Tensor:
        """Propose drafts, compute each row's newest token and its drafts, and return the logits in `samples.logits`.

        rows: [B] int32; samples: B * (1 + num_drafts) slots, written.
        """
        return self._verify(rows, num_drafts, samples, False)

    @torch.inference_mode()
    def verify_adapted(self, rows: Tensor, num_drafts: int, samples: SampleBuffers) -> Tensor:
        """Do what `verify` does, with the adapters of the rows; drafts need none."""
        return self._verify(rows, num_drafts, samples, True)

    def _verify(self, rows: Tensor, num_drafts: int, samples: SampleBuffers, has_adapters: bool) -> Tensor:
        assert self.speculator is not None, "drafts without a speculator"
        queries = 1 + num_drafts
        if self.speculator.model is None:  # The passes of a draft model have graphs of their own.
            self.speculator.propose(rows, num_drafts)
        tokens = self.speculator.verify_inputs(rows, num_drafts, self.page_tables, (samples.rows, samples.positions))
        step = self._decode_step(tokens.rows, tokens.positions, queries=queries)
        slots = tokens.slot_mapping.unbind()
        of_rows = TokenRows(samples.rows, tokens.positions, queries=queries) if self.kv.recurrent else None
        given = tokens.input_ids, tokens.positions, slots, None, step, step, tokens.rows, of_rows
        adapters = self._adapters(tokens.rows) if has_adapters else None
        batch = ForwardBatch(*given, has_drafts=True, adapters=adapters)
        return self.model.logits(self.model.forward(batch, self.kv), samples.logits)

    @torch.inference_mode()
    def draft(self, drafter: ModelDrafter, rows: Tensor, samples: SampleBuffers, is_first: bool) -> Tensor:
        """Compute the inputs of the next draft of each row, and return its logits in `samples.logits`.

        The model of this pass is the draft model. rows: [B] int32; samples: B slots, written; is_first: True before the
        first draft of a step.
        """
        queries, index = catch_up_tokens(len(rows)) if is_first else 1, drafter.scratch.index[: len(rows)]
        tokens = drafter.inputs(rows, queries, (samples.rows, samples.positions), index, is_first)
        step = self._decode_step(tokens.rows, tokens.positions, queries=queries)
        slots, newest = tokens.slot_mapping.unbind(), index if is_first else None
        batch = ForwardBatch(
            tokens.input_ids, tokens.positions, slots, newest, step, step, tokens.rows, has_drafts=True
        )
        return drafter.logits(self.model.forward(batch, self.kv), samples.logits)

    @torch.inference_mode()
    def draft_prompt(
        self, drafter: ModelDrafter, rows: Tensor, positions: Tensor, prompts: PromptStep, attended: Tensor
    ) -> Tensor:
        """Compute keys and values of known tokens, and return the final hidden states, [T, hidden].

        The model of this pass is the draft model. Arguments are as for `mixed`, without decode rows.
        """
        input_ids, slot_mapping = self._inputs(rows, positions)
        attention = MixedStep(self._decode_step(rows[:0], positions[:0]), prompts, attended)
        given = drafter.known_ids(input_ids), positions, slot_mapping.unbind(), None, attention, None, rows
        return self.model.forward(ForwardBatch(*given), self.kv)

    def max_short_len(self, rows: int) -> int:
        """Return the largest number of positions of a row that needs no spare programs.

        A decode step of such rows is faster without them. 0 if this number of rows has no spare programs, and if each
        row has several programs of its own: they combine their results in any case, and idle programs cost almost
        nothing.
        """
        splits, extra_splits = self._programs(rows)
        return max_len_without_extra_splits(splits) if splits == 1 and extra_splits else 0

    @torch.inference_mode()
    def mixed(
        self, rows: Tensor, positions: Tensor, bucket: GraphBucket, prompts: PromptStep, attended: Tensor
    ) -> Tensor:
        """Return the final hidden states of a step with prompts, [T, hidden].

        rows, positions: [T] int32, laid out as the bucket has it, positions as in `decode`; prompts: the attention of
        the rows of several tokens; attended: [T, heads, head_dim], as `MixedStep.out`.
        """
        return self._mixed(rows, positions, bucket, prompts, attended, None)

    @torch.inference_mode()
    def mixed_adapted(
        self, rows: Tensor, positions: Tensor, bucket: GraphBucket, prompts: PromptStep, attended: Tensor
    ) -> Tensor:
        """Do what `mixed` does, with the adapters of the rows."""
        return self._mixed(rows, positions, bucket, prompts, attended, self._adapters(rows))

    def _mixed(
        self,
        rows: Tensor,
        positions: Tensor,
        bucket: GraphBucket,
        prompts: PromptStep,
        attended: Tensor,
        adapters: AdapterTokens | None,
    ) -> Tensor:
        # With drafts a row may have all its tokens: its state must stay as it is.
        live = torch.empty_like(rows) if self.kv.recurrent and self.speculator is not None else None
        kept = None if live is None else (live, torch.empty_like(positions))
        input_ids, slot_mapping = self._inputs(rows, positions, kept)
        count = bucket.num_decode_tokens
        decode = self._decode_step(rows[:count], positions[:count])
        attention = MixedStep(decode, prompts, attended)
        spans = min(MAX_PROMPTS, max(1, bucket.num_prefill_tokens // 2))
        tokens = None
        if self.kv.recurrent:
            tokens = TokenRows(rows if live is None else live, positions, count, spans)
        given = input_ids, positions, slot_mapping.unbind(), None, attention, None, rows, tokens
        batch = ForwardBatch(*given, adapters=adapters)
        return self.model.forward(batch, self.kv)

    @torch.inference_mode()
    def head(self, hidden: Tensor, rows: Tensor, positions: Tensor, index: Tensor, samples: SampleBuffers) -> Tensor:
        """Return the logits of a mixed step's samples, in `samples.logits`.

        hidden: [T, hidden], final states; rows, positions: [T] int32, as `mixed` leaves them; index: [P] int32, token
        index of each sample, negative for padding; samples: P slots, written.
        """
        given = hidden, rows, positions, index, samples.rows, samples.positions
        return self.model.logits(gather_samples(*given, pdl=self.gpu.pdl), samples.logits)

    @torch.inference_mode()
    def update_tables(self, locations: Tensor, inputs: Tensor) -> None:
        """Write a step's updates of tables, before its forward pass."""
        update_tables(locations, inputs, self.tables.pages, self.tables.sampling)

    def _adapters(self, rows: Tensor) -> AdapterTokens:
        """Return the adapters of tokens. rows: [T] int32, row of each."""
        assert self.adapters is not None, "adapters without memory for them"
        return self.adapters.of(rows)

    def _inputs(
        self, rows: Tensor, positions: Tensor, kept: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        return decode_inputs(self.tables.sampling, self.page_tables, rows, positions, kept, pdl=self.gpu.pdl)

    def _decode_step(self, rows: Tensor, positions: Tensor, has_long_rows: bool = True, queries: int = 1) -> DecodeStep:
        splits, count = self._programs(len(rows) // queries)
        count = count if has_long_rows else 0
        extra_splits = assign_extra_splits(positions, splits, count, pdl=self.gpu.pdl, queries=queries)
        return DecodeStep(rows, positions, self.page_tables, splits, self.gpu, extra_splits, queries)

    def _programs(self, rows: int) -> tuple[int, int]:
        """Return the programs of every row of a step, and the spare ones."""
        _, kv_heads, head_dim = self.kv.keys[0].shape
        batch, longest, dtype = max(1, rows), self.tables.tokens.shape[1], self.kv.keys[0].dtype
        fewest = choose_plan(head_dim, batch * kv_heads, dtype, dtype, self.gpu).splits
        splits = choose_splits(batch, kv_heads, self.gpu.multiprocessors, longest, fewest)
        return splits, choose_extra_splits(rows, kv_heads, self.gpu.multiprocessors, longest, splits)
