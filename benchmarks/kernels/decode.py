"""Kernels of a decode step other than matmuls: attention, norms, gated activation, RoPE and input preparation.

A graph launches a kernel on several buffer sets in turn, together larger than the L2 cache. Bandwidth counts the bytes
that have to be moved at least once, as a share of the measured read bandwidth. Suffixes: "pdl" for programmatic
dependent launch, "pair" for attention after its RoPE kernel, as a layer runs them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.suite import READ_GB_PER_S, Model, Options, Record, random_rows
from benchmarks.measuring.graph_timing import graph_microseconds
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs
from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_splits, fit_plan
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.norm import add_rms_norm, rms_norm
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.runtime.tables import DeviceTables

WORKING_SET = 256e6
PAGE = 16
LOADS = (
    *((1, 448), (8, 448), (32, 448), (64, 448), (128, 448), (256, 448), (64, 1024)),
    *((1, 8192), (1, 131072), (16, 8192)),
)
"""Rows and context of decode attention."""
PAIRED = ((64, 448), (256, 448), (64, 1024))
"""Loads that are timed with RoPE as well."""
SWEPT = [
    Tile(*t)
    for t in (
        (16, 2, 3),
        (32, 1, 3),
        (32, 2, 3),
        (32, 4, 3),
        (32, 1, 4),
        (64, 2, 2),
        (64, 2, 3),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
    )
]

Launch = Callable[[], Any]
Timing = tuple[str, float, float]
"""Label, microseconds, and bytes moved."""


def sets(bytes_each: float) -> int:
    """Return the number of buffer sets that a graph cycles through."""
    return max(16, min(256, int(WORKING_SET / bytes_each)))


def paged_sets(batch: int, context: int, model: Model) -> tuple[list[tuple[Any, ...]], float]:
    """Return the arguments of `paged_decode`, one set per layer, and the bytes that one launch reads."""
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    pages = ceil_div(context, PAGE)
    size = batch * context * kv_heads * head_dim * 4 + batch * heads * head_dim * 4
    table = torch.zeros(batch + 1, pages, dtype=torch.int32)
    table[1:] = (torch.randperm(batch * pages) + 1).view(batch, pages)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    layout = KVLayout.of_one_group(
        sets(size), page_size=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    storage = KVStorage.allocate(layout, batch * pages + 1, "cuda")
    storage.pool.normal_()
    shared = (rows, positions, storage.page_table(table.cuda()), head_dim**-0.5)
    pools = zip(storage.keys, storage.values, strict=True)
    return [(random_rows(batch, heads, head_dim), keys, values, *shared) for keys, values in pools], size


def attention(options: Options) -> Iterator[Timing]:
    kv_heads = options.model.kv_heads
    for batch, context in LOADS:
        given, size = paged_sets(batch, context, options.model)
        name = f"paged_decode B={batch} context {context}"
        splits = choose_splits(batch, kv_heads, 132, context)
        longest = choose_splits(batch, kv_heads, 132, 131072)
        variants: list[tuple[str, dict[str, Any]]] = [
            ("", {"splits": splits}),
            (" pdl", {"splits": splits, "pdl": True}),
            (" pdl, graph for 128k", {"splits": longest, "pdl": True}),
        ]
        if options.sweep:
            variants += [(f" pdl {tuple(t)}", {"splits": splits, "pdl": True, "tile": t}) for t in SWEPT]
            variants += [(f" pdl, {n} splits", {"splits": n, "pdl": True, "least": 64}) for n in (1, 2, 4, 8)]
        for suffix, keywords in variants:
            launches = [partial(paged_decode, *args, **keywords) for args in given]
            yield name + suffix, graph_microseconds(launches), size
        if (batch, context) in PAIRED:
            yield f"{name}, pair", graph_microseconds(pairs(given)), size
        del given, launches


def pairs(given: Sequence[tuple[Any, ...]]) -> list[Launch]:
    """Return a launch for each layer: RoPE, then attention using the engine's plan."""
    gpu = read_gpu_traits()
    query, keys, _, rows, positions, table, _ = given[0]
    (batch, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    chosen = choose_plan(head_dim, batch * kv_heads, query.dtype, keys.dtype, gpu)
    plan = fit_plan(chosen, query, keys, gpu)
    splits = choose_splits(batch, kv_heads, gpu.multiprocessors, int(positions.max()) + 1, plan.splits)
    cos, sin = torch.rand(2, batch, 1, head_dim, device="cuda").unbind(0)
    slots = table.slots(rows.long(), positions.long())
    qkvs = [random_rows(batch, heads + 2 * kv_heads, head_dim) for _ in given]

    def both(qkv: Tensor, layer: tuple[Any, ...]) -> Tensor:
        _, keys, values, rows, positions, table, scale = layer
        query = rope_and_kv_write(qkv, cos, sin, slots, keys, values, pdl=gpu.pdl)
        tile, least, early = plan.tile, plan.least, plan.early
        return paged_decode(
            query, keys, values, rows, positions, table, scale, splits, pdl=gpu.pdl, tile=tile, least=least, early=early
        )

    return [partial(both, qkv, layer) for qkv, layer in zip(qkvs, given, strict=True)]


def norms(pdl: bool) -> Iterator[Timing]:
    for tokens, hidden in ((1, 2048), (64, 2048), (256, 4096), (8192, 2048), (8192, 4096)):
        unit = tokens * hidden * 2
        weight = random_rows(hidden)
        pairs = [(random_rows(tokens, hidden), random_rows(tokens, hidden)) for _ in range(sets(4 * unit))]
        launches: list[Launch] = [partial(rms_norm, x, weight, 1e-5, pdl=pdl) for x, _ in pairs]
        yield f"rms_norm {tokens}x{hidden}", graph_microseconds(launches), 2 * unit
        launches = [partial(add_rms_norm, x, r, weight, 1e-5, pdl=pdl) for x, r in pairs]
        yield f"add_rms_norm {tokens}x{hidden}", graph_microseconds(launches), 4 * unit


def activation(pdl: bool) -> Iterator[Timing]:
    for tokens, width in ((1, 8192), (64, 8192), (256, 14336), (8192, 8192)):
        size = tokens * width * 6
        launches: list[Launch] = [
            partial(gated_activation, random_rows(tokens, 2 * width), Activation.SILU, pdl) for _ in range(sets(size))
        ]
        yield f"gated_activation {tokens}x{width}", graph_microseconds(launches), size


def rope(pdl: bool) -> Iterator[Timing]:
    for tokens, head_dim, norm in (
        (1, 64, False),
        (64, 64, False),
        (64, 128, True),
        (256, 128, False),
        (8192, 64, False),
    ):
        size = 2 * tokens * 48 * head_dim * 2 + tokens * head_dim * 4
        cos, sin = torch.chunk(torch.rand(tokens, 2, head_dim, device="cuda"), 2, 1)
        index = torch.randperm(tokens + 16, device="cuda")[:tokens]
        weight = random_rows(head_dim) if norm else None
        launches: list[Launch] = []
        for _ in range(sets(size)):
            pools = random_rows(tokens + 16, 8, head_dim), random_rows(tokens + 16, 8, head_dim)
            qkv = random_rows(tokens, 48, head_dim)
            launches.append(partial(rope_and_kv_write, qkv, cos, sin, index, *pools, weight, weight, pdl=pdl))
        yield f"rope {tokens}x48x{head_dim}{' qk-norm' * norm}", graph_microseconds(launches), size


def inputs(pdl: bool) -> Iterator[Timing]:
    tables = DeviceTables.allocate(256, 4096, (PageColumns(0, 4096 // PAGE),), torch.device("cuda"))
    table = PageTable(tables.pages, PAGE, PAGE)
    for batch in (1, 256):
        rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
        launches: list[Launch] = [partial(decode_inputs, tables.sampling, [table], rows, rows.clone(), pdl=pdl)] * 32
        yield f"decode_inputs {batch}", graph_microseconds(launches), batch * 32


def records(timings: Iterable[Timing]) -> list[Record]:
    """Print each timing and return its record."""
    found = []
    for label, us, size in timings:
        rate = size / us / 1e3
        print(f"{label:58}{us:9.2f} us{rate:8.0f} GB/s{rate / READ_GB_PER_S:7.1%}", flush=True)
        found.append({"kernel": label, "us": us, "gb_per_s": rate, "of_peak": rate / READ_GB_PER_S})
    return found


def measure_attention(options: Options) -> list[Record]:
    """Time decode attention of a model; with --sweep over tiles and splits too."""
    return records(attention(options))


def measure_elementwise(_: Options) -> list[Record]:
    """Time the other kernels of a decode step, with and without programmatic dependent launch."""
    kernels = (norms, activation, rope, inputs)
    with_pdl = ((f"{label} pdl", us, size) for kernel in kernels for label, us, size in kernel(True))
    return records(itertools.chain(*(kernel(False) for kernel in kernels), with_pdl))
