"""Time decode attention for the tuner.

A graph runs all layers of a model at several contexts, each after the RoPE kernel that writes the newest keys and
values. Timing attention back to back misleads, since its programs then overlap with another attention: with 512 pairs
of heads of 128 elements, an H200 was faster back to back using tile (32, 1, 4) than (64, 4, 2), but slower after RoPE.
Where attention fuses RoPE, a norm of the projection replaces the matmul before it.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import choose_fused_rope_plan, choose_splits, fit_plan
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.norm import rms_norm
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan
from tandem.engine_core.kernels.tiles.table import DecodeKey
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage

CONTEXTS = (448, 1024)
LONGEST = 8192
"""Maximum context of the captured graphs that are timed."""
KV_HEADS, GROUP, PAGE = 8, 4, 16
LAYERS, REPLAYS = 16, 9
"""Number of layers, the same for all keys because the kernel's code depends on it."""
KV_DTYPES = {16: torch.bfloat16, 8: torch.float8_e4m3fn}
"""KV dtypes by bits."""


class Layer(NamedTuple):
    """Arguments of RoPE and attention in one layer."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    """Slots of the newest positions."""
    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    page_table: PageTable


def layers(key: DecodeKey, context: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Layer]:
    """Return the arguments of each layer, with scattered pages.

    dtype: of queries, and of 16-bit keys and values.
    """
    kv_dtype = dtype if key.kv_bits == 16 else KV_DTYPES[key.kv_bits]
    batch = max(1, key.pairs // KV_HEADS)
    kv_heads = min(KV_HEADS, key.pairs)
    pages = ceil_div(context, PAGE)
    table = torch.zeros(batch + 1, pages, dtype=torch.int32)
    table[1:] = (torch.randperm(batch * pages) + 1).view(batch, pages)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    layout = KVLayout.of_one_group(LAYERS, page_size=PAGE, kv_heads=kv_heads, head_dim=key.head_dim, dtype=kv_dtype)
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
    """Run RoPE, then attention using a plan, as a captured step does.

    splits: maximum programs per row; None for the number in a step of these rows.
    """
    (rows, all_heads, head_dim), kv_heads = layer.qkv.shape, layer.keys.shape[1]
    if splits is None:
        splits = choose_splits(rows, kv_heads, gpu.multiprocessors, LONGEST, plan.splits)
    plan = fit_plan(plan, layer.qkv[:, : all_heads - 2 * kv_heads], layer.keys, gpu)
    rotation, query = None, layer.qkv
    if choose_fused_rope_plan(head_dim, rows * kv_heads, layer.keys.dtype, gpu) is None:
        query = rope_and_kv_write(*layer[:6], pdl=gpu.pdl)
    else:
        rotation = Rotation(layer.cos, layer.sin, layer.slots)
        rms_norm(query.flatten(1), query.flatten(1)[0], 1e-5, pdl=gpu.pdl)
    return paged_decode(
        *(query, *layer[4:], head_dim**-0.5, splits),
        pdl=gpu.pdl,
        tile=plan.tile,
        least=plan.least,
        early=plan.early,
        rotation=rotation,
    )


class DecodeTimer:
    """Timer of decode attention after RoPE. Caches the inputs of the last key."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu
        self._kept: tuple[DecodeKey, list[list[Layer]]] | None = None

    def __call__(self, key: DecodeKey, plan: DecodePlan) -> float:
        """Return the microseconds of RoPE and attention in one layer, as the geometric mean over contexts."""
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
    """Run a plan once on a few rows."""
    rows = max(1, key.pairs // KV_HEADS)
    splits = choose_splits(rows, min(KV_HEADS, key.pairs), gpu.multiprocessors, LONGEST, plan.splits)
    few = layers(key._replace(pairs=min(key.pairs, 8 * KV_HEADS)), 64, device)[0]
    run(few, plan, gpu, splits)
