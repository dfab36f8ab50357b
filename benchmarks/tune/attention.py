"""Decode attention as the tuner times it.

A graph runs it over the layers of a model, at several contexts.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.paged_decode import choose_splits, fit_tile, paged_decode
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan
from tandem.engine_core.kernels.tiles.table import DecodeKey
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage

CONTEXTS = (448, 1024)
LONGEST = 8192
"""Longest context possible where the timed graphs would be captured."""
KV_HEADS, GROUP, PAGE = 8, 4, 16
LAYERS, REPLAYS = 16, 9
"""The number of layers is the same for all keys, because the code of the kernel depends on it."""
KV_DTYPES = {16: torch.bfloat16, 8: torch.float8_e4m3fn}
"""Dtypes of keys and values, by the bits of an element."""
Given = tuple[Any, ...]


def layers(key: DecodeKey, context: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Given]:
    """Return the arguments of `paged_decode` for each layer.

    The pages of rows are scattered. dtype: of queries, and of keys and values of 16 bits.
    """
    kv_dtype = dtype if key.kv_bits == 16 else KV_DTYPES[key.kv_bits]
    batch = max(1, key.pairs // KV_HEADS)
    kv_heads = min(KV_HEADS, key.pairs)
    pages = ceil_div(context, PAGE)
    table = torch.zeros(batch + 1, pages, dtype=torch.int32)
    table[1:] = (torch.randperm(batch * pages) + 1).view(batch, pages)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    layout = KVLayout(
        group=KVGroup(tuple(range(LAYERS))), page_size=PAGE, kv_heads=kv_heads, head_dim=key.head_dim, dtype=kv_dtype
    )
    storage = KVStorage.allocate(layout, batch * pages + 1, device)
    if key.kv_bits == 16:
        storage.pool.normal_()
    else:
        storage.pool.view(torch.uint8).random_(0, 64)
    shared = (rows, positions, storage.page_table(table.to(device)), key.head_dim**-0.5)
    query = torch.randn(batch, kv_heads * GROUP, key.head_dim, device=device, dtype=dtype)
    return [(query, keys, values, *shared) for keys, values in zip(storage.keys, storage.values, strict=True)]


def run(given: Given, plan: DecodePlan, gpu: GpuTraits) -> Tensor:
    """Attend by a plan, as a captured step does."""
    query, keys = given[:2]
    splits = choose_splits(len(query), keys.shape[1], gpu.multiprocessors, LONGEST, plan.splits)
    return paged_decode(
        *given, splits, pdl=gpu.pdl, tile=fit_tile(plan.tile, query, keys, gpu), least=plan.least
    )  # fmt: skip


class DecodeTimer:
    """Timer of decode attention, which keeps the inputs of the last key."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu
        self._kept: tuple[DecodeKey, list[list[Given]]] | None = None

    def __call__(self, key: DecodeKey, plan: DecodePlan) -> float:
        """Return the microseconds of one layer.

        They are the geometric mean over the contexts.
        """
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = key, [layers(key, context, "cuda") for context in CONTEXTS]
        times = []
        for given in self._kept[1]:
            chain = partial(_all, given, plan, self.gpu)
            times.append(graph_seconds(chain, REPLAYS) * 1e6 / len(given))
        return math.exp(sum(map(math.log, times)) / len(times))


def _all(given: list[Given], plan: DecodePlan, gpu: GpuTraits) -> None:
    for one in given:
        run(one, plan, gpu)


def launch_decode(key: DecodeKey, plan: DecodePlan, gpu: GpuTraits, device: str) -> None:
    """Run a plan once on few rows."""
    splits = choose_splits(max(1, key.pairs // KV_HEADS), min(KV_HEADS, key.pairs), gpu.multiprocessors, LONGEST)
    given = layers(key._replace(pairs=min(key.pairs, 8 * KV_HEADS)), 64, device)[0]
    query, keys = given[:2]
    tile = fit_tile(plan.tile, query, keys, gpu)
    paged_decode(*given, max(splits, plan.splits), pdl=gpu.pdl, tile=tile, least=plan.least)
