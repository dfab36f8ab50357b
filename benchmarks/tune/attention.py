"""Decode attention as the tuner times it.

A graph runs it over the layers of a model, at several contexts, after the rotation that writes the newest keys and
values. Attention back to back misleads: its programs start beside the last ones of another attention, which are not
those of a layer. At 512 pairs of heads of 128 elements, an H200 ran it faster back to back with tile (32, 1, 4) than
with (64, 4, 2), and slower after the rotation. Where attention rotates heads itself, a norm of the projection stands in
for the product that makes it.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import choose_rotating, choose_splits, fit_plan
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.norm import rms_norm
from tandem.engine_core.kernels.page_table import PageTable
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


class Layer(NamedTuple):
    """Arguments of the rotation and the attention of one layer."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    """Of the newest positions."""
    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    page_table: PageTable


def layers(key: DecodeKey, context: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Layer]:
    """Return what each layer is given.

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
    page_table = storage.page_table(table.to(device))
    slots = page_table.slots(rows.long(), positions.long())
    cos, sin = torch.rand(2, batch, 1, key.head_dim, device=device).unbind(0)
    qkv = torch.randn(batch, kv_heads * (GROUP + 2), key.head_dim, device=device, dtype=dtype)
    pools = zip(storage.keys, storage.values, strict=True)
    return [Layer(qkv, cos, sin, slots, keys, values, rows, positions, page_table) for keys, values in pools]


def run(layer: Layer, plan: DecodePlan, gpu: GpuTraits, splits: int | None = None) -> Tensor:
    """Rotate, then attend by a plan, as a captured step does.

    splits: programs that may share a row; None: as many as in a step of these rows.
    """
    (rows, all_heads, head_dim), kv_heads = layer.qkv.shape, layer.keys.shape[1]
    if splits is None:
        splits = choose_splits(rows, kv_heads, gpu.multiprocessors, LONGEST, plan.splits)
    plan = fit_plan(plan, layer.qkv[:, : all_heads - 2 * kv_heads], layer.keys, gpu)
    rotation, query = None, layer.qkv
    if choose_rotating(head_dim, rows * kv_heads, layer.keys.dtype, gpu) is None:
        query = rope_and_kv_write(*layer[:6], pdl=gpu.pdl)
    else:
        rotation = Rotation(layer.cos, layer.sin, layer.slots)
        rms_norm(query.flatten(1), query.flatten(1)[0], 1e-5, pdl=gpu.pdl)
    return paged_decode(
        *(query, *layer[4:], head_dim**-0.5, splits),
        pdl=gpu.pdl, tile=plan.tile, least=plan.least, early=plan.early, rotation=rotation,
    )  # fmt: skip


class DecodeTimer:
    """Timer of decode attention after its rotation; it keeps the last key's inputs."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu
        self._kept: tuple[DecodeKey, list[list[Layer]]] | None = None

    def __call__(self, key: DecodeKey, plan: DecodePlan) -> float:
        """Return the microseconds of both in one layer.

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


def _all(given: list[Layer], plan: DecodePlan, gpu: GpuTraits) -> None:
    for one in given:
        run(one, plan, gpu)


def launch_decode(key: DecodeKey, plan: DecodePlan, gpu: GpuTraits, device: str) -> None:
    """Run a plan once on few rows."""
    rows = max(1, key.pairs // KV_HEADS)
    splits = choose_splits(rows, min(KV_HEADS, key.pairs), gpu.multiprocessors, LONGEST, plan.splits)
    few = layers(key._replace(pairs=min(key.pairs, 8 * KV_HEADS)), 64, device)[0]
    run(few, plan, gpu, splits)
