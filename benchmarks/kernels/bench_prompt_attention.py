"""Attention time of a prompt's chunk beside decode rows.

Triton, by tile and splits, is compared with FlashInfer's kernels and a ceiling.

    python -m benchmarks.kernels.bench_prompt_attention [--heads 32 --kv-heads 8 --head-dim 64] [--all] [--save N]

Microseconds per layer, of 16 layers over one page-major pool in one CUDA graph. The ceiling is the larger of the KV
bytes over 4,385 GB/s and the multiplications over 790 TFLOP/s. The last lines: decode of 16 rows and a chunk, one after
the other and side by side. `--all` tries every tile, without it only the chosen one.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import triton
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.results import save
from tandem.engine_core.attention.base import Span
from tandem.engine_core.attention.triton import RaggedPlanner
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention import decode_plans, paged_decode, paged_prefill
from tandem.engine_core.kernels.attention.paged_prefill import TileShape
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import read_gpu_traits

LAYERS, PAGE = 16, 16
BYTES_PER_SECOND, FLOPS = 4.385e12, 7.9e14
CONTEXTS, TOKENS = (0, 1024, 4096, 8064), (32, 64, 128, 256, 512)
DECODE_ROWS, DECODE_CONTEXT = 16, 1536
SHAPES = [TileShape(*s) for s in product((64, 128), (64, 128), (4, 8), (2, 3)) if s[0] * s[1] <= 128 * 128]


class Setup:
    """Pools of all layers, with one row of the greatest length and decode rows."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        longest = max(CONTEXTS) + max(TOKENS)
        used, decoding = ceil_div(longest, PAGE), ceil_div(DECODE_CONTEXT, PAGE)
        pages = 1 + used + DECODE_ROWS * decoding
        ids = torch.randperm(pages - 1).to(torch.int32) + 1
        self.table = torch.zeros(1 + DECODE_ROWS, used, dtype=torch.int32)
        self.table[0] = ids[:used]
        self.table[1:, :decoding] = ids[used:].view(DECODE_ROWS, decoding)
        self.table = self.table.cuda()
        group = KVGroup(tuple(range(LAYERS)))
        layout = KVLayout(group=group, page_size=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
        self.storage = KVStorage.allocate(layout, pages, "cuda")
        self.storage.pool.normal_(0, 0.5)
        self.page_table = self.storage.page_table(self.table)
        self.scale = head_dim**-0.5
        self.gpu = read_gpu_traits()

    def queries(self, shape: TileShape) -> int:
        """Return the number of queries in one tile."""
        return max(1, shape.rows // int(triton.next_power_of_2(self.heads // self.kv_heads)))

    def query(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.heads, self.head_dim, device="cuda", dtype=torch.bfloat16)

    def ceiling(self, tokens: int, context: int) -> float:
        keys = context + tokens
        read = 4 * keys * self.kv_heads * self.head_dim / BYTES_PER_SECOND
        work = 4 * self.heads * self.head_dim * (tokens * context + tokens * tokens / 2) / FLOPS
        return max(read, work) * 1e6


def graph_us(layer: Callable[[int], object]) -> float:
    """Return the median time of a layer, in microseconds."""

    def layers() -> None:
        for index in range(LAYERS):
            layer(index)

    return graph_seconds(layers, replays=10) * 1e6 / LAYERS


def triton_layer(
    setup: Setup, tokens: int, context: int, shape: TileShape, splits: int, pdl: bool = False, beside: bool = False
) -> Callable[[int], Tensor]:
    queries = setup.queries(shape)
    host = partial(torch.empty, dtype=torch.int32)
    ragged = RaggedPlanner.allocate(host, torch.device("cuda"), setup.gpu, queries, 1, tokens)
    tiles = ragged.plan([Span(0, 0, context, tokens)], setup.page_table).tiles
    query, out = setup.query(tokens), torch.zeros_like(setup.query(tokens))

    def layer(index: int) -> Tensor:
        keys, values = setup.storage.keys[index], setup.storage.values[index]
        return paged_prefill.paged_prefill(
            query, keys, values, tiles, setup.page_table, setup.scale, splits,
            pdl=pdl, beside=beside, shape=shape, out=out,
        )  # fmt: skip

    return layer


def flashinfer_layer(setup: Setup, tokens: int, context: int, backend: str) -> Callable[[int], Tensor]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    used = ceil_div(context + tokens, PAGE)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", True, ints(0, 0).cuda(), ints(0, 0).cuda(), setup.table[0].clone(), ints(0).cuda(),
        backend=backend,
    )  # fmt: skip
    wrapper.plan(
        ints(0, tokens), ints(0, used), setup.table[0, :used], ints((context + tokens - 1) % PAGE + 1),
        setup.heads, setup.kv_heads, setup.head_dim, PAGE, causal=True, sm_scale=setup.scale,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, seq_lens=ints(context + tokens),
    )  # fmt: skip
    query, out = setup.query(tokens), setup.query(tokens)

    def layer(index: int) -> Tensor:
        keys, values = setup.storage.keys[index], setup.storage.values[index]
        pool = setup.page_table.view_pages(keys), setup.page_table.view_pages(values)
        result: Tensor = wrapper.run(query, pool, out=out)
        return result

    return layer


def compare(setup: Setup, shapes: list[TileShape]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for tokens, context in product(TOKENS, CONTEXTS):
        found = {}
        for shape in shapes:
            tiles = ceil_div(tokens, setup.queries(shape))
            best = paged_prefill.choose_splits(tiles, setup.kv_heads, setup.gpu.multiprocessors)
            for splits in sorted({1, best, min(2 * best, decode_plans.MAX_SPLITS)} if len(shapes) > 1 else {1, best}):
                found[f"{'x'.join(map(str, shape))}/{splits}"] = graph_us(
                    triton_layer(setup, tokens, context, shape, splits)
                )
        library = {}
        for backend in ("fa2", "fa3"):
            library[backend] = graph_us(flashinfer_layer(setup, tokens, context, backend))
        top = sorted(found.items(), key=lambda item: item[1])[:6]
        line = "  ".join(f"{name} {us:.1f}" for name, us in [*library.items(), *top])
        ceiling = setup.ceiling(tokens, context)
        print(f"{tokens:4d} at {context:5d}, ceiling {ceiling:5.1f}: {line}", flush=True)
        rows.append({"tokens": tokens, "context": context, "ceiling": ceiling, **library, "triton": found})
    return rows


def beside_decode(setup: Setup, shape: TileShape) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
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

        print(f"decode of {DECODE_ROWS} rows, {splits} splits: {graph_us(decode):.1f} us")
        for tokens, context in product((64, 128), (4096, 8064)):
            tiles = ceil_div(tokens, setup.queries(shape))
            shares = paged_prefill.choose_splits(tiles, setup.kv_heads, setup.gpu.multiprocessors)
            times: dict[str, float] = {}
            for name, pdl, beside in (("alone", False, False), ("pdl", True, False), ("beside", True, True)):
                chunk = triton_layer(setup, tokens, context, shape, shares, pdl, beside)

                def both(index: int, chunk: Callable[[int], Tensor] = chunk) -> None:
                    decode(index)
                    chunk(index)

                times[name] = graph_us(chunk if name == "alone" else both)
            said = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"  {tokens} at {context}, {shares} splits: {said}", flush=True)
            found.append({"tokens": tokens, "context": context, "decode_splits": splits, "splits": shares, **times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    setup = Setup(arguments.heads, arguments.kv_heads, arguments.head_dim)
    chosen = paged_prefill.choose_shape(arguments.head_dim, torch.bfloat16)
    rows = compare(setup, SHAPES if arguments.all else [chosen])
    beside = beside_decode(setup, chosen)
    if arguments.save:
        config = {"heads": arguments.heads, "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim}
        figures = {"us a layer": rows, "beside decode, us a layer": beside}
        print(save(arguments.save, config | {"gpu": torch.cuda.get_device_name()}, figures))


if __name__ == "__main__":
    main()
