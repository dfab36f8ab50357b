"""Attention with the project's Triton kernels.

Decode steps need no planning; other steps may have rows of any lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention, PromptStep, Span
from tandem.engine_core.kernels.attention.decode_plans import (
    PDL_DELAY_MIN_WIDTH,
    choose_fused_rope_plan,
    choose_plan,
    fit_plan,
)
from tandem.engine_core.kernels.attention.extra_splits import ExtraSplits
from tandem.engine_core.kernels.attention.paged_decode import paged_decode, split_scratch
from tandem.engine_core.kernels.attention.paged_prefill import (
    TILE_WORDS,
    TileShape,
    choose_shape,
    fit_shape,
    paged_prefill,
)
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.quantize import group_of, quantize_by_amax
from tandem.engine_core.kernels.quantized_activation import (
    WHOLE,
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
    quantizes_in_tiles,
)
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """An `AttentionStep` and `FusedStep` with the same number of queries in each row, adjacent tokens of it.

    A captured graph keeps reading its tensors.
    """

    rows: Tensor
    """[T] int32, row of the page table of each token."""
    positions: Tensor
    """[T] int32, position of each token; those of a row do not descend."""
    page_tables: Sequence[PageTable]
    """The pages of all rows, by KV group."""
    splits: int
    """Number of splits per row."""
    gpu: GpuTraits
    extra_splits: ExtraSplits | None = None
    """Additional splits of long rows."""
    queries: int = 1
    """Number of queries of a row; RoPE is fused only with one."""

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
        out: Tensor | None = None,
        scratch: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Implement `AttentionStep.run`.

        out: output tensor, shaped like query, given if `paged_prefill` will run concurrently; scratch: as in
        `paged_decode`.
        """
        plan, heads = self._plan(query, keys)
        return self._run(plan, query, heads, keys, values, layer, scales, out=out, scratch=scratch)

    def _plan(self, query: Tensor, keys: Tensor) -> tuple[DecodePlan, int]:
        tokens, heads, head_dim = query.shape
        pairs = tokens // self.queries * keys.shape[1]
        return choose_plan(head_dim, pairs, query.dtype, keys.dtype, self.gpu), heads

    def fuses_rope(self, keys: Tensor) -> bool:
        """Implement `FusedStep.fuses_rope`."""
        return self._rope_plan(keys) is not None

    def _rope_plan(self, keys: Tensor) -> DecodePlan | None:
        if self.queries > 1:
            return None
        return choose_fused_rope_plan(keys.shape[2], len(self.rows) * keys.shape[1], keys.dtype, self.gpu)

    def run_with_rope(
        self,
        qkv: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Implement `FusedStep.run_with_rope`."""
        plan, heads = self._plan_with_rope(qkv, keys)
        return self._run(plan, qkv, heads, keys, values, layer, scales, rotation=rotation)

    def _plan_with_rope(self, qkv: Tensor, keys: Tensor) -> tuple[DecodePlan, int]:
        """Return the plan of a step with fused RoPE, and the number of query heads."""
        (rows, all_heads, head_dim), kv_heads = qkv.shape, keys.shape[1]
        plan = self._rope_plan(keys) or choose_plan(head_dim, rows * kv_heads, qkv.dtype, keys.dtype, self.gpu)
        return plan, all_heads - 2 * kv_heads

    def fuses_quant(self, to: ActivationFormat, head_dim: int) -> bool:
        """Implement `FusedStep.fuses_quant`."""
        return quantizes_in_tiles(group_of(to), head_dim)

    def run_quantized(
        self,
        heads: Tensor,
        rotation: Rotation | None,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None,
        to: ActivationFormat,
    ) -> QuantizedActivation:
        """Implement `FusedStep.run_quantized`, in two launches if each row has one scale."""
        plan, count = self._plan_with_rope(heads, keys) if rotation is not None else self._plan(heads, keys)
        given = (plan, heads, count, keys, values, layer, scales)
        if group_of(to) == WHOLE:
            amax = torch.empty(len(heads), count, device=heads.device)
            attended = self._run(*given, rotation=rotation, amax=amax)
            return quantize_by_amax(attended.flatten(1), amax, to, self.gpu.pdl)
        quantized = empty_quantized_activation(len(heads), count * heads.shape[2], heads.dtype, to, heads.device)
        self._run(*given, rotation=rotation, quantized=quantized)
        return quantized

    def _run(
        self,
        plan: DecodePlan,
        query: Tensor,
        heads: int,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None,
        *,
        out: Tensor | None = None,
        scratch: tuple[Tensor, Tensor] | None = None,
        rotation: Rotation | None = None,
        quantized: QuantizedActivation | None = None,
        amax: Tensor | None = None,
    ) -> Tensor:
        plan = fit_plan(plan, query[:, :heads], keys, self.gpu, self.queries)
        return paged_decode(
            *(query, keys, values, self.rows, self.positions, self.page_tables[layer.group]),
            *(layer.scale, self.splits),
            window=layer.window,
            softcap=layer.softcap,
            pdl=self.gpu.pdl,
            tile=plan.tile,
            least=plan.least,
            early=plan.early,
            delay_next=out is None and heads * query.shape[2] >= PDL_DELAY_MIN_WIDTH,
            out=out,
            scratch=scratch,
            scales=scales,
            extra_splits=self.extra_splits,
            rotation=rotation,
            quantized=quantized,
            amax=amax,
            queries=self.queries,
        )

    def scratch(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the scratch of `run` for partial results."""
        count = self.extra_splits.count if self.extra_splits is not None else 0
        return split_scratch(query, self.splits, count, self.queries)


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """An `AttentionStep` and a `PromptStep` for rows of any lengths.

    A captured graph keeps reading its tensors.
    """

    tiles: Tensor
    """[N, TILE_WORDS] int32, as in `paged_prefill`."""
    page_tables: Sequence[PageTable]
    """The pages of all rows, by KV group."""
    gpu: GpuTraits
    splits: int = 1
    """Number of splits per tile."""

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention, scales: Tensor | None = None
    ) -> Tensor:
        """Implement `AttentionStep.run`."""
        return paged_prefill(
            *(query, keys, values, self.tiles, self.page_tables[layer.group], layer.scale, self.splits),
            window=layer.window,
            softcap=layer.softcap,
            shape=self._shape(query, keys),
            scales=scales,
        )

    def run_into(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: LayerAttention,
        scales: Tensor | None = None,
        *,
        overlaps_decode: bool,
    ) -> None:
        """Implement `PromptStep.run_into`."""
        paged_prefill(
            *(query, keys, values, self.tiles, self.page_tables[layer.group], layer.scale, self.splits),
            window=layer.window,
            softcap=layer.softcap,
            pdl=self.gpu.pdl,
            overlap=overlaps_decode,
            shape=self._shape(query, keys),
            out=out,
            scales=scales,
        )

    def _shape(self, query: Tensor, keys: Tensor) -> TileShape:
        return fit_shape(choose_shape(query.shape[2], query.dtype), query, keys, self.gpu)


@dataclass(frozen=True, slots=True)
class MixedStep:
    """An `AttentionStep` with the single-query rows first.

    A captured graph keeps reading its tensors.
    """

    decode: DecodeStep
    """Attention of the single-query rows."""
    prompts: PromptStep
    """Attention of the other rows."""
    out: Tensor
    """[T, heads, head_dim], the output of every layer.

    Padding keeps the contents of an earlier layer or step: only padding's own keys are computed from it, on the padding
    page, and only padding reads those.
    """

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention, scales: Tensor | None = None
    ) -> Tensor:
        """Implement `AttentionStep.run`, returning `out`."""
        count = len(self.decode.rows)
        # Keep it alive until both kernels are enqueued: they run concurrently and must not share memory.
        scratch = self.decode.scratch(query[:count])
        if count:
            self.decode.run(query[:count], keys, values, layer, scales, self.out[:count], scratch)
        self.prompts.run_into(self.out[count:], query[count:], keys, values, layer, scales, overlaps_decode=count > 0)
        return self.out


def max_tiles(rows: int, tokens: int, queries: int) -> int:
    """Return the maximum number of tiles of a step.

    Each row may end with a partial tile. rows, tokens: of the step; queries: per full tile.
    """
    return rows + tokens // queries


def max_graph_tiles(rows: int, tokens: int, queries: int) -> int:
    """Return the maximum number of tiles of a step in a graph.

    rows: maximum number of multi-token rows of the graph; tokens: maximum number of their tokens; queries: per full
    tile.
    """
    return max_tiles(min(rows, max(1, tokens // 2)), tokens, queries)


class RaggedPlanner:
    """An `AttentionPlanner` for small steps, and for dtypes and shapes that FlashInfer does not support.

    Each slot has its own instance, because planning writes into pinned memory that the device still reads (I6).
    """

    def __init__(self, gpu: GpuTraits, queries: int, host: Tensor, tiles: Tensor) -> None:
        """Store the buffers that plans are written to.

        queries: per tile; host: pinned int32, shaped like tiles; tiles: [N, TILE_WORDS] int32 on the device.
        """
        self.gpu = gpu
        self.queries = queries
        self.host = host
        self.view = host.numpy()
        self.tiles = tiles

    @classmethod
    def allocate(
        cls,
        pinned: Callable[..., Tensor],
        device: torch.device,
        gpu: GpuTraits,
        queries: int,
        max_rows: int,
        max_step_tokens: int,
    ) -> "RaggedPlanner":
        """Allocate the tiles of the largest step.

        pinned: allocates int32 host memory of a given shape, from which copies do not synchronize; queries: per tile.
        """
        shape = (max_tiles(max_rows, max_step_tokens, queries), TILE_WORDS)
        return cls(gpu, queries, pinned(*shape), torch.zeros(shape, dtype=torch.int32, device=device))

    def plan(self, spans: Sequence[Span], page_tables: Sequence[PageTable]) -> RaggedStep:
        """Implement `AttentionPlanner.plan`."""
        return RaggedStep(self.upload(spans), page_tables, self.gpu)

    def upload(self, spans: Sequence[Span], num_tiles: int = 0) -> Tensor:
        """Copy the tiles of the spans to the device.

        They are padded with unused tiles to `num_tiles`. Return the tiles on the device, [N, TILE_WORDS] int32.
        """
        work = [
            (span.row, span.offset + before, span.start + before, span.length - before)
            for span in spans
            for before in range(0, span.length, self.queries)
        ]
        view = self.view[: max(len(work), num_tiles)]
        view[: len(work)] = np.array(work, dtype=np.int32).reshape(-1, TILE_WORDS)
        view[len(work) :] = 0
        tiles = self.tiles[: len(view)]
        tiles.copy_(self.host[: len(view)], non_blocking=True)
        return tiles


class RaggedGraphPlanner:
    """A `GraphPromptPlanner` for graphs with a fixed number of tiles.

    Surplus tiles are unused.
    """

    def __init__(self, ragged: RaggedPlanner, step: RaggedStep) -> None:
        """Store a slot's planner and the step that its graphs capture.

        ragged: of the slot; step: over the first tiles of `ragged`, up to the graph's capacity.
        """
        self.ragged = ragged
        self.step = step

    @classmethod
    def build(
        cls, ragged: RaggedPlanner, num_tiles: int, splits: int, page_tables: Sequence[PageTable]
    ) -> "RaggedGraphPlanner":
        """Build a planner for graphs of `num_tiles` tiles.

        splits: per tile.
        """
        return cls(ragged, RaggedStep(ragged.tiles[:num_tiles], page_tables, ragged.gpu, splits))

    def plan(self, spans: Sequence[Span]) -> None:
        """Implement `GraphPromptPlanner.plan`."""
        self.ragged.upload(spans, len(self.step.tiles))

    def gather_pages(self) -> None:
        """Implement `GraphPromptPlanner.gather_pages`.

        There is nothing to do: the kernel reads the page table itself.
        """
        return None
