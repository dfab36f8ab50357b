"""Compile the Triton kernels for any GPU architecture, without a GPU.

`python -m tests.support.compiled_kernels [--all-tiles] [--share=1/4] 80 89 ...` prints one line of JSON per kernel and
architecture (80 for sm_80), for all launches or a share. Tests start this process: Triton's interpreter must be off.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.measuring.offline_compiler import CompileOnlyDriver
from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.triton import DecodeStep, RaggedStep
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs
from tandem.engine_core.kernels.attention.decode_plans import TILES, choose_plan
from tandem.engine_core.kernels.attention.extra_splits import ExtraSplits, assign_extra_splits
from tandem.engine_core.kernels.attention.paged_prefill import TILE_WORDS
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.attention.table_updates import update_tables
from tandem.engine_core.kernels.delta_rule.accepted import fold_accepted
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, ModelStates, Pieces, TokenRows
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.kernel_set import triton_kernels
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv_kernel
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm_kernel
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.paged_pool import HEAD_DIMS, head_width
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference.sampling import SEGMENT
from tandem.engine_core.kernels.sampling.gather import gather_samples
from tandem.engine_core.kernels.sampling.logprobs import TritonScorer
from tandem.engine_core.kernels.sampling.scratch import SamplingScratch
from tandem.engine_core.kernels.speculation.accept import accept
from tandem.engine_core.kernels.speculation.draft_steps import draft_inputs, note_accepted, write_drafts
from tandem.engine_core.kernels.speculation.ngram import propose_ngrams
from tandem.engine_core.kernels.speculation.reference import DraftState, NgramRule
from tandem.engine_core.kernels.speculation.verify_inputs import verify_inputs
from tandem.engine_core.kernels.tiles.table import DecodeKey, TileTable
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.sampling.triton_sampler import CAPACITY, GROUP, TILE, TritonSampler
from tests.fakes.gpus import A100, B200, H200, L4, RTX_3090, RTX_5090
from tests.support.compiled_lora import matmuls_with_updates, updates
from tests.support.compiled_matmuls import (
    BOTH,
    FP8,
    SHAPES,
    Launch,
    dequantized,
    few_rows_products,
    gated_w8a8_matmuls,
    half,
    int4_matmuls,
    normed_products,
    products,
    rounding,
    w8_matmuls,
    w8a8_matmuls,
)
from tests.support.compiled_moe import int4_experts, mixtures
from tests.support.length_tables import tables_of
from tests.support.sampling_case import make_case

GPUS = {80: A100, 86: RTX_3090, 89: L4, 90: H200, 100: B200, 120: RTX_5090}


class Compiler:
    """Replaces kernel launches: compiles each launched kernel and reports on it."""

    def __init__(self, architecture: int, once: bool) -> None:
        """Compile for one architecture.

        once: only the first variant of each kernel, with and without an order of inputs, adapters and a tile for the
        last expert, except for kernels with measured tiles.
        """
        self.architecture = architecture
        self.once = once
        self.run = JITFunction.run
        self.seen: set[object] = set()

    def launch(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        several = {splitk_gemm_kernel.__name__, quantized_gemv_kernel.__name__, "_paged_decode_kernel"}
        several |= {"_grouped_gemm_kernel"}
        variant = (
            kernel.__name__,
            options.get("ORDERED"),
            options.get("TOKENS"),
            bool(options.get("SHARED")),
            options.get("QUANT"),
            bool(options.get("PARTS")),
            options.get("BLOCK_TOP", 0) < options.get("TOP_K", 0),
        )
        if self.once and kernel.__name__ not in several and variant in self.seen:
            return
        self.seen.add(variant)
        began = time.perf_counter()
        compiled = self.run(kernel, *arguments, grid=grid, warmup=True, **options)
        if compiled.hash in self.seen:
            return
        self.seen.add(compiled.hash)
        line = {
            "kernel": kernel.__name__,
            "architecture": self.architecture,
            "shared_memory": compiled.metadata.shared,
            "chained": "griddepcontrol" in compiled.asm["ptx"],
            "code_bytes": len(compiled.asm["cubin"]),
            "ordered": options.get("ORDERED"),
            "inputs": options.get("BLOCK_K"),
            "early": options.get("EARLY"),
            "delays_next": options.get("DELAY_NEXT"),
            "starts_next": "griddepcontrol.launch_dependents" in compiled.asm["ptx"],
            "stages": options.get("STAGES"),
            "wgmma": "wgmma" in compiled.asm["ptx"],
            "copies_before_wait": copies_before_wait(compiled.asm["ttgir"]),
            "seconds": round(time.perf_counter() - began, 2),
        }
        print(json.dumps(line), flush=True)


def copies_before_wait(code: str) -> int:
    """Count the copies to shared memory before the last wait for the preceding kernel."""
    return code.rpartition("griddepcontrol.wait")[0].count("ttg.async_commit_group")


def kind_of(head_dim: int) -> LayerAttention:
    """Heads of 256 elements use the sizes of Gemma 2's local layers."""
    return LayerAttention(0.1, window=4096, softcap=50.0) if head_dim == 256 else LayerAttention(0.1)


def table_for(layer: LayerAttention, rows: int) -> PageTable:
    """Return a page table, with columns that repeat for a layer with a window."""
    ring = 0 if layer.window is None else 258
    return PageTable(torch.zeros(rows, max(8, 2 * ring), dtype=torch.int32), 16, 64, layer.window, ring)


def scales_for(kv_dtype: torch.dtype) -> Tensor | None:
    return torch.ones(2) if kv_dtype == FP8 else None


def decode(
    gpu: GpuTraits,
    head_dim: int,
    group: int,
    pairs: int,
    kv_dtype: torch.dtype,
    splits: int = 2,
    extra_splits: int = 0,
    early: bool | None = None,
    kv_heads: int = 1,
    rotary_dim: int | None = None,
    norm: bool = False,
    queries: int = 1,
) -> Launch:
    """Decode of a number of (row, KV head) pairs.

    early: None for the rule's choice; rotary_dim: None for rotated heads; norm: of the heads before RoPE; queries: of a
    row.
    """
    if early is not None:
        keyed = DecodeKey(head_width(head_dim), 8 * kv_dtype.itemsize, 1 << (pairs.bit_length() - 1))
        plan = choose_plan(head_dim, pairs, torch.bfloat16, kv_dtype, gpu)._replace(early=early)
        gpu = replace(gpu, tiles=TileTable(gpu.name, {}, {keyed: plan}))
    rows = pairs // kv_heads
    index, pool = torch.zeros(rows * queries, dtype=torch.int32), half(64, kv_heads, head_dim, dtype=kv_dtype)
    query, layer = half(rows * queries, kv_heads * group, head_dim), kind_of(head_dim)
    table = table_for(layer, rows)
    shared = (
        ExtraSplits(torch.zeros(2 * rows + extra_splits, dtype=torch.int32), extra_splits) if extra_splits else None
    )
    step = DecodeStep(index, index, [table], splits, gpu, shared, queries)
    if rotary_dim is None:
        return lambda: step.run(query, pool, pool, layer, scales_for(kv_dtype))
    qkv, angles = half(rows, kv_heads * (group + 2), head_dim), torch.zeros(rows, 1, rotary_dim)
    norms = (half(head_dim), half(head_dim)) if norm else (None, None)
    rotation = Rotation(angles, angles, torch.zeros(rows, dtype=torch.int64), *norms)
    return lambda: step.run_with_rope(qkv, rotation, pool, pool, layer, scales_for(kv_dtype))


def prompts(gpu: GpuTraits, head_dim: int, group: int, kv_dtype: torch.dtype, splits: int = 2) -> Launch:
    """One tile of prompts, on one KV head and overlapping decode rows."""
    query, pool, layer = half(1, group, head_dim), half(64, 1, head_dim, dtype=kv_dtype), kind_of(head_dim)
    table = table_for(layer, 1)
    ragged = RaggedStep(torch.zeros(1, TILE_WORDS, dtype=torch.int32), [table], gpu, splits)
    return lambda: ragged.run_into(query, query, pool, pool, layer, scales_for(kv_dtype), overlaps_decode=True)


def sampling(gpu: GpuTraits, tile: int, segment: int, group: int, capacity: int) -> Iterator[Launch]:
    case = make_case(2, 4 * tile)
    case.logits = case.logits.bfloat16()
    size = (4 * tile, 2, tile, segment, group, capacity)
    sampler = TritonSampler(case.tables, SamplingScratch.allocate(*size, torch.device("cpu"), gpu.pdl))
    out, allowed = torch.zeros_like(case.rows), torch.zeros(2, tile // 8, dtype=torch.int32)
    for mode in Mode:
        batch = case.batch(out, allowed=allowed if mode is Mode.MASKED else None)
        yield lambda mode=mode, batch=batch: sampler.launch(mode, batch)
    scorer = TritonScorer(4 * tile, 2, 4, torch.device("cpu"), tile)
    yield lambda: scorer.run(case.logits, out, 4, torch.zeros(2, 9, dtype=torch.int32))


def rotation(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines, sines and slots of two tokens."""
    angles = torch.zeros(2, 1, head_dim)
    return angles, angles, torch.zeros(2, dtype=torch.int64)


def layer_kernels(gpu: GpuTraits) -> Iterator[Launch]:
    kernels, x, weight = triton_kernels(gpu.pdl), half(2, 256), half(256)
    order = torch.zeros(256, dtype=torch.int32)
    for places in (None, order):
        yield lambda places=places: kernels.rms_norm(x, weight, 1e-5, places)
    yield lambda: kernels.norm_add_rms_norm(x, weight.float(), x, weight.float(), 1e-5, None)
    yield lambda: kernels.gather_columns(x, order)
    yield lambda: kernels.soft_cap(x, 30.0)
    yield lambda: kernels.gated_activation(x, Activation.SILU)
    pool, angles, slots = half(16, 1, 32), torch.zeros(2, 1, 32), torch.zeros(2, dtype=torch.int64)
    heads = x.view(2, 8, 32)
    norms = (half(32), half(32), 1e-6)
    for gated in BOTH:
        given = (heads, angles, angles, slots, pool, pool, *norms, None, False, gated)
        yield lambda given=given: kernels.rope_and_kv_write(*given)
    for head_dim, part in ((128, 96), (64, 22), (96, 96)):
        heads, pool, angles = half(2, 6, head_dim), half(16, 1, head_dim), torch.zeros(2, 1, part)
        call = (heads, angles, angles, slots, pool, pool, None, None, 1e-6, None)
        for isolate in BOTH:
            yield lambda call=call, isolate=isolate: kernels.rope_and_kv_write(*call, isolate, False)
    index = torch.zeros(2, dtype=torch.int32)
    pages = torch.zeros(2, 20, dtype=torch.int32)
    table, ring = PageTable(pages[:, :8], 16, 64), PageTable(pages[:, 8:], 16, 64, window=40, ring=6)
    tables = tables_of(torch.zeros(2, 64, dtype=torch.int32))
    for page_tables in ([table], [table, ring]):
        given = tables, page_tables, index, index, (index, index)
        yield lambda given=given: decode_inputs(*given, pdl=gpu.pdl)
    yield lambda: update_tables(index.new_zeros(9, 2), index, pages, tables)
    yield lambda: gather_samples(x, index, index, index, index, index, pdl=gpu.pdl)
    yield lambda: assign_extra_splits(index, 1, 17, pdl=gpu.pdl)
    rule, more = NgramRule(2, 4, 8192), index.new_zeros(8)
    yield lambda: propose_ngrams(tables, index.new_zeros(2, 64), index, 3, index, rule, pdl=gpu.pdl)
    yield lambda: verify_inputs(tables, [table, ring], index, 4, (more, more), pdl=gpu.pdl)
    yield lambda: accept(tables, index, 4, more, index, index, pdl=gpu.pdl)
    state = DraftState(index, index)
    for is_first, queries in ((True, 4), (False, 1)):
        passed = tables, [table], state, index, queries, (more, more), more.long(), is_first
        yield lambda passed=passed: draft_inputs(*passed, pdl=gpu.pdl)
    yield lambda: write_drafts(tables, state, index, more, more, pdl=gpu.pdl)
    yield lambda: note_accepted(tables, state, index, more, pdl=gpu.pdl)
    yield from recurrent_kernels(gpu)


def recurrent_kernels(gpu: GpuTraits) -> Iterator[Launch]:
    """The kernels of a recurrent layer, in the sizes of Qwen 3.5 9B."""
    kernels, tokens = triton_kernels(gpu.pdl), 8
    shape = DeltaRuleShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    index = torch.zeros(tokens, dtype=torch.int32)
    state = DeltaRuleState.allocate(shape, 2, torch.bfloat16, torch.device("cpu"))
    rows = TokenRows(index, index, 4, 2)
    pieces = Pieces(index[:2], index.new_zeros(4, 2), index.new_zeros(2, 2))
    x, values, heads = half(tokens, shape.channels), half(tokens, shape.values), torch.zeros(shape.value_heads)
    gates, mixed = half(tokens, 2 * shape.value_heads), half(tokens, shape.value_heads, shape.value_dim)
    yield lambda: kernels.find_pieces(rows)
    yield lambda: kernels.short_conv(x, half(shape.channels, 1, 4), shape, state, rows, pieces)
    yield lambda: kernels.delta_rule(x, gates, heads, heads, shape, state, rows, pieces)
    models = ModelStates.allocate(shape, 2, 2, torch.bfloat16, torch.device("cpu"), max_drafts=7)
    for number in (tokens, 40):  # Of few rows, and of more than `SMALL_BATCH`.
        verified = TokenRows(*torch.zeros(2, number, dtype=torch.int32).unbind(), queries=8)
        given = half(number, shape.channels), half(number, 2 * shape.value_heads), heads, heads, shape, models.layers[0]
        yield lambda given=given, verified=verified: kernels.delta_rule(*given, verified, None)
    yield lambda: fold_accepted(models.stacked, index, index, index, pdl=gpu.pdl)
    yield lambda: kernels.gated_norm(mixed, values, half(shape.value_dim), 1e-6, rows)
    yield lambda: kernels.sigmoid_gate(half(tokens, 1024), half(tokens, 8, 128))


def decodes_before_products(gpu: GpuTraits) -> Iterator[Launch]:
    """With and without early loads; the matmul after 8 KV heads is delayed."""
    for early, kv_heads in product(BOTH, (1, 8)):
        yield decode(gpu, 128, 4, 512, torch.bfloat16, splits=1, early=early, kv_heads=kv_heads)


def decodes_of_several_queries(gpu: GpuTraits, head_dims: tuple[int, ...] = (128,)) -> Iterator[Launch]:
    """With early loads and without, as few heads as a tile holds and more, and 8-bit keys and values."""
    for head_dim in head_dims:
        yield decode(gpu, head_dim, 4, 8, torch.bfloat16, early=True, queries=4)
        yield decode(gpu, head_dim, 4, 256, torch.bfloat16, splits=1, extra_splits=17, queries=8)
        yield decode(gpu, head_dim, 8, 8, torch.bfloat16, queries=8)
        if gpu.capability >= FP8_CAPABILITY:
            yield decode(gpu, head_dim, 4, 64, FP8, queries=4)


def rotating_decodes(gpu: GpuTraits, head_dims: tuple[int, ...] = (64,)) -> Iterator[Launch]:
    """With early loads and without, whole heads and parts of them, norms, and 8-bit keys and values."""
    for head_dim, early in product(head_dims, BOTH):
        yield decode(gpu, head_dim, 4, 64, torch.bfloat16, early=early, rotary_dim=head_dim)
        yield decode(gpu, head_dim, 4, 512, torch.bfloat16, splits=1, early=early, rotary_dim=22, norm=True)
        if gpu.capability >= FP8_CAPABILITY:
            yield decode(gpu, head_dim, 4, 64, FP8, early=early, rotary_dim=head_dim)


def rounding_decodes(gpu: GpuTraits) -> Iterator[Launch]:
    """With static, per-head and per-row scales, by one program per row and by several."""
    index, pool = torch.zeros(8, dtype=torch.int32), half(64, 8, 128)
    table = PageTable(torch.zeros(8, 8, dtype=torch.int32), 16, 64)
    formats = ActivationFormat(FP8, scale=torch.ones(1)), ActivationFormat(FP8, 128), ActivationFormat(torch.int8)
    for to, splits in product(formats, (1, 2)):
        given = (half(8, 32, 128), None, pool, pool, LayerAttention(0.1), None, to)
        step = DecodeStep(index, index, [table], splits, gpu)
        if to.dtype == torch.int8 or gpu.capability >= FP8_CAPABILITY:
            yield lambda step=step, given=given: step.run_quantized(*given)


def one_tile_of_each(gpu: GpuTraits) -> Iterator[Launch]:
    """The tiles with the most shared memory for kernels with several, and small ones otherwise."""
    yield from layer_kernels(gpu)
    yield from products(gpu, 1, 256, 512)
    yield from normed_products(gpu, 20480, 2560)
    yield from few_rows_products(gpu)
    yield from products(gpu, 16, 3072, 2048)
    yield list(w8_matmuls(gpu, 16, 3072, 2048))[-1]
    yield from w8_matmuls(gpu, 1, 3072, 2048, (True,))
    yield list(rounding(gpu))[-3]
    yield from dequantized(gpu)
    for rows in (32, 256):
        yield list(w8a8_matmuls(gpu, rows, 4096, 4096))[-1]
    for rows in (1, 16):
        yield from int4_matmuls(gpu, rows, 3072, 2048, (True,))
    yield list(int4_matmuls(gpu, 1, 3072, 2048, (False,), group=32))[-1]
    yield decode(gpu, 128, 4, 256, torch.bfloat16, splits=1, extra_splits=17)
    yield from decodes_before_products(gpu)
    yield from decodes_of_several_queries(gpu)
    yield from rotating_decodes(gpu)
    yield from islice(rounding_decodes(gpu), 3, None)
    yield from islice(gated_w8a8_matmuls(gpu, 64), 0, None, 2)
    yield from mixtures(gpu, (4, 64), (16,))
    yield from islice(int4_experts(gpu, 8), 2)
    yield from updates(gpu)
    yield from matmuls_with_updates(gpu, 1)
    yield prompts(gpu, 32, 4, torch.bfloat16, splits=1)
    yield from sampling(gpu, 128, 32, 32, 32)


def every_tile(gpu: GpuTraits) -> Iterator[Launch]:
    """The plans chosen for the measured models, and every attention tile."""
    yield from layer_kernels(gpu)
    yield from rounding(gpu)
    yield from dequantized(gpu)
    yield from few_rows_products(gpu)
    for outputs, inputs, gated in SHAPES:
        for rows in (1, 16, 32, 64, 128):
            yield from products(gpu, rows, outputs, inputs, (gated,))
            yield from w8_matmuls(gpu, rows, outputs, inputs, (gated,))
            yield from int4_matmuls(gpu, rows, outputs, inputs, (gated,))
        for rows in (16, 32, 64, 128, 2048):
            yield from w8a8_matmuls(gpu, rows, outputs, inputs)
        yield from normed_products(gpu, outputs, inputs, (gated,))
    for head_dim in HEAD_DIMS:
        tiles = TILES[head_width(head_dim)]
        for pairs, group in product((max(1, least) for least in tiles), (1, 32)):
            for early in BOTH:
                yield decode(gpu, head_dim, group, pairs, torch.bfloat16, early=early)
            yield decode(gpu, head_dim, group, pairs, torch.bfloat16, splits=1, extra_splits=17)
        yield prompts(gpu, head_dim, 4, torch.bfloat16)
        if gpu.capability >= FP8_CAPABILITY:
            call = (half(2, 6, head_dim), *rotation(head_dim), *[half(16, 1, head_dim, dtype=FP8)] * 2)
            call = (*call, None, None, 1e-6, torch.ones(2))
            for isolate in BOTH:
                yield lambda call=call, isolate=isolate: triton_kernels(gpu.pdl).rope_and_kv_write(
                    *call, isolate, False
                )
            for early, pairs in product(BOTH, (32, 256, 512, 1024)):
                yield decode(gpu, head_dim, 4, pairs, FP8, early=early)
            yield prompts(gpu, head_dim, 4, FP8)
    yield from decodes_before_products(gpu)
    yield from decodes_of_several_queries(gpu, HEAD_DIMS)
    yield from rotating_decodes(gpu, HEAD_DIMS)
    yield from rounding_decodes(gpu)
    for rows in (16, 32, 64):
        yield from gated_w8a8_matmuls(gpu, rows)
    yield from mixtures(gpu, (1, 4, 8, 64, 256, 512, 8192))
    yield from updates(gpu)
    yield from matmuls_with_updates(gpu)
    yield from sampling(gpu, TILE, SEGMENT, GROUP, CAPACITY)


def main(arguments: list[str]) -> None:
    assert "TRITON_INTERPRET" not in os.environ, "interpreted kernels cannot be compiled"
    everything = "--all-tiles" in arguments
    shares = [word.removeprefix("--share=").split("/") for word in arguments if word.startswith("--share=")]
    part, parts = map(int, shares[0]) if shares else (1, 1)
    for architecture in [int(word) for word in arguments if word.isdigit()]:
        driver.set_active(CompileOnlyDriver(architecture))
        compiler = Compiler(architecture, once=not everything)
        with patch.object(JITFunction, "run", lambda *given, to=compiler, **options: to.launch(*given, **options)):
            kinds = recurrent_kernels if "--recurrent" in arguments else every_tile if everything else one_tile_of_each
            launches = kinds(GPUS[architecture])
            for launch in islice(launches, part - 1, None, parts):
                launch()


if __name__ == "__main__":
    main(sys.argv[1:])
