"""Kernel times of a decode step on the GPU, inside CUDA graphs.

The results are microseconds per launch, and GB/s.

A graph launches the kernel on many buffer sets in turn, together larger than the second-level cache, and is replayed;
the median replay counts. Bytes are the least that have to be moved; the ceiling is the measured read bandwidth.

    python -m benchmarks.kernels.bench_decode_kernels [--only paged] [--save NAME] [--sweep]
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.results import save
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
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.runtime.tables import DeviceTables

CEILING = 4385
"""Read bandwidth in GB/s: `torch.sum` over 8 GB on an H200."""
WORKING_SET = 256e6
PAGE = 16
PAIRED = ((64, 448), (256, 448), (64, 1024))
"""Rows and contexts of attention that is timed after its rotation too, as a layer runs them."""
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


def microseconds(launches: Sequence[Launch]) -> float:
    """Time one launch in microseconds, in a graph that makes all of them."""

    def launch_all() -> None:
        for launch in launches:
            launch()

    return graph_seconds(launch_all, replays=15) * 1e6 / len(launches)


def sets(bytes_each: float) -> int:
    """Return the number of buffer sets that a graph rotates over."""
    return max(16, min(256, int(WORKING_SET / bytes_each)))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def paged_sets(
    batch: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[list[tuple[Any, ...]], float]:
    """Return the arguments of `paged_decode`, one set per layer as in a model.

    Also returns the bytes that one launch has to read.
    """
    pages = ceil_div(context, PAGE)
    size = batch * context * kv_heads * head_dim * 4 + batch * heads * head_dim * 4
    table = torch.zeros(batch + 1, pages, dtype=torch.int32)
    table[1:] = (torch.randperm(batch * pages) + 1).view(batch, pages)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    group = KVGroup(tuple(range(sets(size))))
    layout = KVLayout(group=group, page_size=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    storage = KVStorage.allocate(layout, batch * pages + 1, "cuda")
    storage.pool.normal_()
    shared = (rows, positions, storage.page_table(table.cuda()), head_dim**-0.5)
    pools = zip(storage.keys, storage.values, strict=True)
    return [(randn(batch, heads, head_dim), keys, values, *shared) for keys, values in pools], size


def bench_paged(sweep: bool) -> Iterator[tuple[str, float, float]]:
    shapes = [(32, 8, 64), (32, 8, 128)]
    loads = [(1, 448), (8, 448), (32, 448), (64, 448), (128, 448), (256, 448), (64, 1024)]
    loads += [(1, 8192), (1, 131072), (16, 8192)]
    for (heads, kv_heads, head_dim), (batch, context) in itertools.product(shapes, loads):
        given, size = paged_sets(batch, context, heads, kv_heads, head_dim)
        name = f"paged D={head_dim} B={batch} context {context}"
        splits = choose_splits(batch, kv_heads, 132, context)
        longest = choose_splits(batch, kv_heads, 132, 131072)
        variants: list[tuple[str, dict[str, Any]]] = [
            ("", {"splits": splits}),
            (" pdl", {"splits": splits, "pdl": True}),
            (" pdl, graph for 128k", {"splits": longest, "pdl": True}),
        ]
        if sweep:
            variants += [(f" pdl {tuple(t)}", {"splits": splits, "pdl": True, "tile": t}) for t in SWEPT]
            variants += [(f" pdl, {n} splits", {"splits": n, "pdl": True, "least": 64}) for n in (1, 2, 4, 8)]
        for suffix, options in variants:
            launches = [partial(paged_decode, *args, **options) for args in given]
            yield name + suffix, microseconds(launches), size
        if (batch, context) in PAIRED:
            yield f"{name}, pair", microseconds(pairs(given)), size
        del given, launches


def pairs(given: Sequence[tuple[Any, ...]]) -> list[Launch]:
    """Return a launch for each layer: rotation, then attention by the engine's plan."""
    gpu = read_gpu_traits()
    query, keys, _, rows, positions, table, _ = given[0]
    (batch, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    chosen = choose_plan(head_dim, batch * kv_heads, query.dtype, keys.dtype, gpu)
    plan = fit_plan(chosen, query, keys, gpu)
    splits = choose_splits(batch, kv_heads, gpu.multiprocessors, int(positions.max()) + 1, plan.splits)
    cos, sin = torch.rand(2, batch, 1, head_dim, device="cuda").unbind(0)
    slots = table.slots(rows.long(), positions.long())
    qkvs = [randn(batch, heads + 2 * kv_heads, head_dim) for _ in given]

    def both(qkv: Tensor, layer: tuple[Any, ...]) -> Tensor:
        rotated = rope_and_kv_write(qkv, cos, sin, slots, *layer[1:3], pdl=gpu.pdl)
        options = {"tile": plan.tile, "least": plan.least, "early": plan.early}
        return paged_decode(rotated, *layer[1:], splits, pdl=gpu.pdl, **options)

    return [partial(both, *one) for one in zip(qkvs, given, strict=True)]


def bench_norms(pdl: bool) -> Iterator[tuple[str, float, float]]:
    for tokens, hidden in ((1, 2048), (64, 2048), (256, 4096), (8192, 2048), (8192, 4096)):
        unit = tokens * hidden * 2
        weight = randn(hidden)
        pairs = [(randn(tokens, hidden), randn(tokens, hidden)) for _ in range(sets(4 * unit))]
        launches: list[Launch] = [partial(rms_norm, x, weight, 1e-5, pdl=pdl) for x, _ in pairs]
        yield f"rms_norm {tokens}x{hidden}", microseconds(launches), 2 * unit
        launches = [partial(add_rms_norm, x, r, weight, 1e-5, pdl=pdl) for x, r in pairs]
        yield f"add_rms_norm {tokens}x{hidden}", microseconds(launches), 4 * unit


def bench_activation(pdl: bool) -> Iterator[tuple[str, float, float]]:
    for tokens, width in ((1, 8192), (64, 8192), (256, 14336), (8192, 8192)):
        size = tokens * width * 6
        launches: list[Launch] = [
            partial(gated_activation, randn(tokens, 2 * width), Activation.SILU, pdl) for _ in range(sets(size))
        ]
        yield f"gated_activation {tokens}x{width}", microseconds(launches), size


def bench_rope(pdl: bool) -> Iterator[tuple[str, float, float]]:
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
        weight = randn(head_dim) if norm else None
        launches: list[Launch] = []
        for _ in range(sets(size)):
            pools = randn(tokens + 16, 8, head_dim), randn(tokens + 16, 8, head_dim)
            qkv = randn(tokens, 48, head_dim)
            launches.append(partial(rope_and_kv_write, qkv, cos, sin, index, *pools, weight, weight, pdl=pdl))
        yield f"rope {tokens}x48x{head_dim}{' qk-norm' * norm}", microseconds(launches), size


def bench_inputs(pdl: bool) -> Iterator[tuple[str, float, float]]:
    tables = DeviceTables.allocate(256, 4096, 4096 // PAGE, torch.device("cuda"))
    table = PageTable(tables.pages, PAGE, PAGE)
    for batch in (1, 256):
        rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
        launches: list[Launch] = [partial(decode_inputs, tables.sampling, table, rows, rows.clone(), pdl=pdl)] * 32
        yield f"decode_inputs {batch}", microseconds(launches), batch * 32


def measure(only: str, sweep: bool) -> Iterator[dict[str, Any]]:
    """Yield one record for each kernel, shape and variant."""
    groups: dict[str, list[Iterator[tuple[str, float, float]]]] = {"paged": [bench_paged(sweep)]}
    for name, bench in (
        ("norm", bench_norms),
        ("silu", bench_activation),
        ("rope", bench_rope),
        ("inputs", bench_inputs),
    ):
        groups[name] = [bench(False), ((label + " pdl", us, size) for label, us, size in bench(True))]
    for label, us, size in itertools.chain.from_iterable(itertools.chain(*(g for n, g in groups.items() if only in n))):
        rate = size / us / 1e3
        print(f"{label:58}{us:9.2f} us{rate:8.0f} GB/s{rate / CEILING:7.1%}", flush=True)
        yield {"kernel": label, "us": us, "gb_per_s": rate, "of_ceiling": rate / CEILING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a group's name: paged, norm, silu, rope, inputs")
    parser.add_argument("--sweep", action="store_true", help="tiles and splits of paged_decode beside the defaults")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    records = list(measure(options.only, options.sweep))
    if options.save:
        gpu = torch.cuda.get_device_name()
        print(save(options.save, {"gpu": gpu, "only": options.only, "ceiling_gb_per_s": CEILING}, records))


if __name__ == "__main__":
    main()
