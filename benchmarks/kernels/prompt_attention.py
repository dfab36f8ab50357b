"""Attention of a prompt chunk: Triton compared with FlashInfer and an upper bound on speed.

Microseconds per layer, of 16 layers over one page-major pool. The bound is the larger of the KV bytes over the read
bandwidth and the FLOPs over the peak. The last lines run decode attention of 16 rows and a chunk, one after the other
and concurrently. With --sweep, every tile is timed, otherwise only the chosen one.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels.suite import (
    LAYERS,
    PEAK_FLOPS,
    READ_GB_PER_S,
    Layer,
    Model,
    Options,
    Record,
    layer_microseconds,
    random_rows,
)
from tandem.engine_core.attention.base import Span
from tandem.engine_core.attention.triton import RaggedPlanner
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention import decode_plans, paged_decode, paged_prefill
from tandem.engine_core.kernels.attention.paged_prefill import TileShape
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import read_gpu_traits

PAGE = 16
CONTEXTS, TOKENS = (0, 1024, 4096, 8064), (32, 64, 128, 256, 512)
DECODE_ROWS, DECODE_CONTEXT = 16, 1536
SHAPES = [TileShape(*s) for s in product((64, 128), (64, 128), (4, 8), (2, 3)) if s[0] * s[1] <= 128 * 128]


class Setup:
    """KV pools of all layers, with one row of the maximum length and some decode rows."""

    def __init__(self, model: Model) -> None:
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_dim
        longest = max(CONTEXTS) + max(TOKENS)
        used, decoding = ceil_div(longest, PAGE), ceil_div(DECODE_CONTEXT, PAGE)
        pages = 1 + used + DECODE_ROWS * decoding
        ids = torch.randperm(pages - 1).to(torch.int32) + 1
        self.table = torch.zeros(1 + DECODE_ROWS, used, dtype=torch.int32)
        self.table[0] = ids[:used]
        self.table[1:, :decoding] = ids[used:].view(DECODE_ROWS, decoding)
        self.table = self.table.cuda()
        layout = KVLayout.of_one_group(
            LAYERS, page_size=PAGE, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=torch.bfloat16
        )
        self.storage = KVStorage.allocate(layout, pages, "cuda")
        self.storage.pool.normal_(0, 0.5)
        self.page_table = self.storage.page_table(self.table)
        self.scale = self.head_dim**-0.5
        self.gpu = read_gpu_traits()

    def queries(self, shape: TileShape) -> int:
        """Return the number of queries in one tile."""
        return max(1, shape.rows // int(triton.next_power_of_2(self.heads // self.kv_heads)))

    def query(self, tokens: int) -> Tensor:
        return random_rows(tokens, self.heads, self.head_dim)

    def bound(self, tokens: int, context: int) -> float:
        keys = context + tokens
        read = 4 * keys * self.kv_heads * self.head_dim / READ_GB_PER_S / 1e9
        work = 4 * self.heads * self.head_dim * (tokens * context + tokens * tokens / 2) / PEAK_FLOPS
        return max(read, work) * 1e6


def triton_layer(
    setup: Setup, tokens: int, context: int, shape: TileShape, splits: int, pdl: bool = False, concurrent: bool = False
) -> Layer:
    queries = setup.queries(shape)
    host = partial(torch.empty, dtype=torch.int32)
    ragged = RaggedPlanner.allocate(host, torch.device("cuda"), setup.gpu, queries, 1, tokens)
    tiles = ragged.plan([Span(0, 0, context, tokens)], [setup.page_table]).tiles
    query, out = setup.query(tokens), torch.zeros_like(setup.query(tokens))

    def layer(index: int) -> Tensor:
        keys, values = setup.storage.keys[index], setup.storage.values[index]
        return paged_prefill.paged_prefill(
            query,
            keys,
            values,
            tiles,
            setup.page_table,
            setup.scale,
            splits,
            pdl=pdl,
            overlap=concurrent,
            shape=shape,
            out=out,
        )

    return layer


def flashinfer_layer(setup: Setup, tokens: int, context: int, backend: str) -> Layer:
    query, out = setup.query(tokens), setup.query(tokens)
    pages = setup.table[0, : ceil_div(context + tokens, PAGE)]
    wrapper = plan_flashinfer(query, setup.storage, pages, context + tokens, setup.scale, backend)

    def layer(index: int) -> Tensor:
        keys, values = setup.storage.keys[index], setup.storage.values[index]
        pool = setup.page_table.view_pages(keys), setup.page_table.view_pages(values)
        result: Tensor = wrapper.run(query, pool, out=out)
        return result

    return layer


def plan_flashinfer(query: Tensor, storage: KVStorage, pages: Tensor, length: int, scale: float, backend: str) -> Any:
    """Return FlashInfer's wrapper planned for the last tokens of one sequence.

    query: [tokens, heads, head_dim]; length: tokens of the sequence, with its context.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    tokens, heads, head_dim = query.shape
    workspace = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", True, ints(0, 0).cuda(), ints(0, 0).cuda(), pages.clone(), ints(0).cuda(), backend=backend
    )
    wrapper.plan(
        ints(0, tokens),
        ints(0, len(pages)),
        pages,
        ints((length - 1) % PAGE + 1),
        heads,
        storage.keys[0].shape[1],
        head_dim,
        PAGE,
        causal=True,
        sm_scale=scale,
        q_data_type=query.dtype,
        kv_data_type=storage.keys[0].dtype,
        o_data_type=torch.bfloat16,
        seq_lens=ints(length),
    )
    return wrapper


def compare(setup: Setup, shapes: list[TileShape]) -> list[Record]:
    rows: list[Record] = []
    for tokens, context in product(TOKENS, CONTEXTS):
        found = {}
        for shape in shapes:
            tiles = ceil_div(tokens, setup.queries(shape))
            best = paged_prefill.choose_splits(tiles, setup.kv_heads, setup.gpu.multiprocessors)
            for splits in sorted({1, best, min(2 * best, decode_plans.MAX_SPLITS)} if len(shapes) > 1 else {1, best}):
                found[f"{'x'.join(map(str, shape))}/{splits}"] = layer_microseconds(
                    triton_layer(setup, tokens, context, shape, splits)
                )
        library = {}
        for backend in ("fa2", "fa3"):
            library[backend] = layer_microseconds(flashinfer_layer(setup, tokens, context, backend))
        top = sorted(found.items(), key=lambda item: item[1])[:6]
        line = "  ".join(f"{name} {us:.1f}" for name, us in [*library.items(), *top])
        bound = setup.bound(tokens, context)
        print(f"{tokens:4d} at {context:5d}, bound {bound:5.1f}: {line}", flush=True)
        rows.append({"tokens": tokens, "context": context, "bound": bound, **library, "triton": found})
    return rows


def measure_with_decode(setup: Setup, shape: TileShape) -> list[Record]:
    found: list[Record] = []
    rows = torch.arange(1, 1 + DECODE_ROWS, dtype=torch.int32, device="cuda")
    positions = torch.full_like(rows, DECODE_CONTEXT - 1)
    query = setup.query(DECODE_ROWS)
    out = torch.zeros_like(query)
    for decode_rows in (DECODE_ROWS, 2 * DECODE_ROWS):
        splits = decode_plans.choose_splits(decode_rows, setup.kv_heads, setup.gpu.multiprocessors, 16384)

        def decode(index: int, splits: int = splits) -> None:
            keys, values = setup.storage.keys[index], setup.storage.values[index]
            paged_decode.paged_decode(
                query, keys, values, rows, positions, setup.page_table, setup.scale, splits, pdl=True, out=out
            )

        print(f"decode of {DECODE_ROWS} rows, {splits} splits: {layer_microseconds(decode):.1f} us")
        for tokens, context in product((64, 128), (4096, 8064)):
            tiles = ceil_div(tokens, setup.queries(shape))
            shares = paged_prefill.choose_splits(tiles, setup.kv_heads, setup.gpu.multiprocessors)
            times: dict[str, float] = {}
            for name, pdl, concurrent in (("alone", False, False), ("pdl", True, False), ("concurrent", True, True)):
                chunk = triton_layer(setup, tokens, context, shape, shares, pdl, concurrent)

                def both(index: int, chunk: Layer = chunk) -> None:
                    decode(index)
                    chunk(index)

                times[name] = layer_microseconds(chunk if name == "alone" else both)
            line = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"  {tokens} at {context}, {shares} splits: {line}", flush=True)
            found.append({"tokens": tokens, "context": context, "decode_splits": splits, "splits": shares, **times})
    return found


def measure(options: Options) -> list[Record]:
    """Time prompt attention alone, then with decode attention."""
    setup = Setup(options.model)
    chosen = paged_prefill.choose_shape(options.model.head_dim, torch.bfloat16)
    return compare(setup, SHAPES if options.sweep else [chosen]) + measure_with_decode(setup, chosen)
