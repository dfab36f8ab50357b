"""Attention over FP8 KV pools compared with bf16 ones.

Prompts of 512, 2,048 and 8,192 tokens using FlashInfer's fa2 and fa3 and Triton, and decode of 64 rows behind 448 and
1,024 positions using Triton, in microseconds per layer. fa2 over FP8 has bf16 queries, fa3 FP8 ones. Keys are scaled by
1,000 before they are stored, so that a scale is needed. The error is that of one prompt from float32, relative to the
RMS of the exact result; queries, keys and values are normal noise. FlashInfer may compile kernels for minutes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.prompt_attention import PAGE, plan_flashinfer
from benchmarks.kernels.suite import LAYERS, Layer, Model, Options, Record, layer_microseconds
from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.triton import DecodeStep, RaggedPlanner
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_splits
from tandem.engine_core.kernels.attention.paged_prefill import tile_queries
from tandem.engine_core.kernels.kv_dtype import LARGEST, write_pool
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import read_gpu_traits

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PROMPTS, DECODES, CHECKED = (512, 2048, 8192), ((64, 448), (64, 1024)), 2048
KEY_FACTOR = 1000.0


class Setup:
    """KV pool of one dtype with the same noise in all layers, its scales, and queries."""

    def __init__(self, model: Model, dtype: torch.dtype, rows: int, length: int) -> None:
        heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.rows, self.length = rows, length
        used = ceil_div(length, PAGE)
        pages = (torch.randperm(rows * used) + 1).view(rows, used).int().cuda()
        layout = KVLayout.of_one_group(LAYERS, page_size=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        self.storage = KVStorage.allocate(layout, rows * used + 1, "cuda")
        self.table = self.storage.page_table(pages)
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (rows * length, kv_heads, head_dim)
        self.keys, self.values = (torch.randn(shape, generator=generator, device="cuda").to(BF16) for _ in range(2))
        self.keys *= KEY_FACTOR
        self.query = torch.randn(length, heads, head_dim, generator=generator, device="cuda") / KEY_FACTOR
        self.scales = None
        if dtype == FP8:
            self.scales = torch.stack((self.keys.abs().max(), self.values.abs().max())).float() / LARGEST
        slots = self.table.slots_between(range(rows), 0, length).flatten()
        for layer in range(LAYERS):
            for kind, pool, x in ((0, self.storage.keys, self.keys), (1, self.storage.values, self.values)):
                write_pool(pool[layer], slots, x, None if self.scales is None else self.scales[kind])
        self.layer = LayerAttention(head_dim**-0.5)
        self.gpu = read_gpu_traits()

    def scaled_query(self, count: int) -> Tensor:
        """Return queries multiplied by the scale of the keys, as the RoPE kernel does."""
        query = self.query[:count]
        return (query if self.scales is None else query * self.scales[0]).to(BF16)

    def exact(self) -> Tensor:
        """Return the attention of one prompt in float32."""
        q, k, v = (x.float().transpose(0, 1) for x in (self.query.to(BF16), self.keys, self.values))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


def triton_layer(setup: Setup) -> Layer:
    """Return Triton's attention of one prompt."""
    queries = tile_queries(setup.heads, setup.kv_heads, setup.head_dim, BF16)
    planner = RaggedPlanner.allocate(pinned, torch.device("cuda"), setup.gpu, queries, 1, setup.length)
    step = planner.plan([Span(0, 0, 0, setup.length)], [setup.table])
    query = setup.scaled_query(setup.length)
    keys, values = setup.storage.keys, setup.storage.values
    return lambda index: step.run(query, keys[index], values[index], setup.layer, setup.scales)


def flashinfer_layer(setup: Setup, backend: str) -> Layer:
    """Return FlashInfer's attention of one prompt.

    fa3 over FP8 needs FP8 queries, which are quantized beforehand.
    """
    query = setup.scaled_query(setup.length)
    scales: tuple[Tensor, ...] = ()
    if backend == "fa3" and setup.scales is not None:
        query_scale = query.abs().max().float() / LARGEST
        query = (query.float() / query_scale).to(FP8)
        # The queries include the scale of the keys already.
        ones = torch.ones(setup.kv_heads, device="cuda")
        scales = (query_scale.repeat(setup.heads), ones, setup.scales[1].repeat(setup.kv_heads))
    wrapper = plan_flashinfer(query, setup.storage, setup.table.pages[0], setup.length, setup.layer.scale, backend)
    out = torch.empty(query.shape, dtype=BF16, device="cuda")

    def layer(index: int) -> Tensor:
        pool = tuple(setup.table.view_pages(part[index]) for part in (setup.storage.keys, setup.storage.values))
        wrapper.run(query, pool, *scales, out=out)
        if setup.scales is not None and not scales:
            out.mul_(setup.scales[1])
        return out

    return layer


def decode_layer(setup: Setup) -> Layer:
    """Return Triton's decode attention of one query per row."""
    rows = torch.arange(setup.rows, dtype=torch.int32, device="cuda")
    positions = torch.full_like(rows, setup.length - 1)
    fewest = choose_plan(setup.head_dim, setup.rows * setup.kv_heads, BF16, setup.dtype, setup.gpu).splits
    splits = choose_splits(setup.rows, setup.kv_heads, setup.gpu.multiprocessors, setup.length, fewest)
    step = DecodeStep(rows, positions, [setup.table], splits, setup.gpu)
    query = setup.scaled_query(setup.rows)
    keys, values = setup.storage.keys, setup.storage.values
    return lambda index: step.run(query, keys[index], values[index], setup.layer, setup.scales)


def measure(options: Options) -> list[Record]:
    """Time prompt and decode attention in both dtypes."""
    return measure_prompts(options.model) + measure_decode(options.model)


def measure_prompts(model: Model) -> list[Record]:
    """Time every kernel at every prompt length, and compare it with float32 at one."""
    records: list[Record] = []
    for tokens in PROMPTS:
        for dtype in (BF16, FP8):
            setup = Setup(model, dtype, 1, tokens)
            layers: dict[str, Callable[[], Layer]] = {
                "fa2": partial(flashinfer_layer, setup, "fa2"),
                "fa3": partial(flashinfer_layer, setup, "fa3"),
                "triton": partial(triton_layer, setup),
            }
            for name, build in layers.items():
                record: Record = {"tokens": tokens, "kernel": name, "bits": 8 * dtype.itemsize}
                try:
                    layer = build()
                    record["us"] = layer_microseconds(layer)
                    if tokens == CHECKED:
                        exact, found = setup.exact(), layer(0)
                        assert isinstance(found, Tensor)
                        error = (found.float() - exact).square().mean() / exact.square().mean()
                        record["error"] = error.sqrt().item()
                except (RuntimeError, ValueError, OSError) as error:
                    record["failed"] = str(error).splitlines()[0][:200]
                print("prompt", *(f"{key} {value}" for key, value in record.items()), sep="  ", flush=True)
                records.append(record)
    return records


def measure_decode(model: Model) -> list[Record]:
    """Time decode attention in both dtypes."""
    records: list[Record] = []
    for rows, context in DECODES:
        for dtype in (BF16, FP8):
            us = layer_microseconds(decode_layer(Setup(model, dtype, rows, context)))
            rate = 2 * rows * context * model.kv_heads * model.head_dim * dtype.itemsize / us / 1e3
            bits = 8 * dtype.itemsize
            print(f"decode  rows {rows}  context {context}  bits {bits}  {us:.1f} us  {rate:.0f} GB/s", flush=True)
            records.append({"rows": rows, "context": context, "bits": bits, "us": us, "gb_per_s": rate})
    return records
