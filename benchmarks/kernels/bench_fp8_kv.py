"""Attention over 8-bit keys and values beside that over 16-bit ones.

    python -m benchmarks.kernels.bench_fp8_kv [--heads 32 --kv-heads 8 --head-dim 128] [--only prompts|decode]
        [--save NAME]

Prompts of 512, 2,048 and 8,192 tokens: FlashInfer's fa2 and fa3 over 16 bits, fa2 with 16-bit queries and fa3 with
8-bit queries over 8 bits, and Triton over both. Decode: 64 rows behind 448 and 1,024 positions. Microseconds a layer,
of 8 layers over one page-major pool in one CUDA graph; with keys that are multiplied by 1,000 before they are stored,
so that they need a scale. The error is that of attention over 2,048 tokens from float32, as a share of its deviation;
queries, keys and values are normal noise. FlashInfer compiles kernels that it lacks, which takes minutes.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.results import save
from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.attention.triton import DecodeStep, RaggedPlanner
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_splits
from tandem.engine_core.kernels.attention.paged_prefill import tile_queries
from tandem.engine_core.kernels.kv_dtype import LARGEST, write_pool
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import read_gpu_traits

LAYERS, PAGE = 8, 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PROMPTS, DECODES, CHECKED = (512, 2048, 8192), ((64, 448), (64, 1024)), 2048
KEY_FACTOR = 1000.0
Layer = Callable[[int], Tensor]


class Setup:
    """A pool of one dtype with the same noise in all layers.

    With it go the queries, and the scales of its keys and values.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rows: int, length: int) -> None:
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.rows, self.length = rows, length
        used = ceil_div(length, PAGE)
        pages = (torch.randperm(rows * used) + 1).view(rows, used).int().cuda()
        group = KVGroup(tuple(range(LAYERS)))
        layout = KVLayout(group=group, page_size=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
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
        slots = self.table.first_slots(slice(0, rows), length).flatten()
        for layer in range(LAYERS):
            for kind, pool, x in ((0, self.storage.keys, self.keys), (1, self.storage.values, self.values)):
                write_pool(pool[layer], slots, x, None if self.scales is None else self.scales[kind])
        self.layer = LayerAttention(head_dim**-0.5)
        self.gpu = read_gpu_traits()

    def rotated(self, count: int) -> Tensor:
        """Return queries as the rotation leaves them, multiplied by the scale of keys."""
        query = self.query[:count]
        return (query if self.scales is None else query * self.scales[0]).to(BF16)

    def exact(self) -> Tensor:
        """Return the attention of one prompt in float32."""
        q, k, v = (x.float().transpose(0, 1) for x in (self.query.to(BF16), self.keys, self.values))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def own_layer(setup: Setup) -> Layer:
    """Return Triton's attention of one prompt."""
    queries = tile_queries(setup.heads, setup.kv_heads, setup.head_dim, BF16)
    planner = RaggedPlanner.allocate(pinned, torch.device("cuda"), setup.gpu, queries, 1, setup.length)
    step = planner.plan([Span(0, 0, 0, setup.length)], setup.table)
    query = setup.rotated(setup.length)
    keys, values = setup.storage.keys, setup.storage.values
    return lambda index: step.run(query, keys[index], values[index], setup.layer, setup.scales)


def library_layer(setup: Setup, backend: str) -> Layer:
    """Return FlashInfer's attention of one prompt.

    fa3 over 8 bits reads queries in 8 bits as well, which are quantized beforehand.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    query, used = setup.rotated(setup.length), ceil_div(setup.length, PAGE)
    own_scales: tuple[Tensor, ...] = ()
    if backend == "fa3" and setup.scales is not None:
        query_scale = query.abs().max().float() / LARGEST
        query = (query.float() / query_scale).to(FP8)
        # The queries were multiplied by the scale of keys already.
        ones = torch.ones(setup.kv_heads, device="cuda")
        own_scales = (query_scale.repeat(setup.heads), ones, setup.scales[1].repeat(setup.kv_heads))
    workspace = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", True, ints(0, 0).cuda(), ints(0, 0).cuda(), setup.table.pages[0].clone(), ints(0).cuda(),
        backend=backend,
    )  # fmt: skip
    wrapper.plan(
        ints(0, setup.length), ints(0, used), setup.table.pages[0], ints((setup.length - 1) % PAGE + 1),
        setup.heads, setup.kv_heads, setup.head_dim, PAGE, causal=True, sm_scale=setup.layer.scale,
        q_data_type=query.dtype, kv_data_type=setup.dtype, o_data_type=BF16, seq_lens=ints(setup.length),
    )  # fmt: skip
    out = torch.empty(query.shape, dtype=BF16, device="cuda")

    def layer(index: int) -> Tensor:
        pool = tuple(setup.table.view_pages(part[index]) for part in (setup.storage.keys, setup.storage.values))
        wrapper.run(query, pool, *own_scales, out=out)
        if setup.scales is not None and not own_scales:
            out.mul_(setup.scales[1])
        return out

    return layer


def decode_layer(setup: Setup) -> Layer:
    """Return Triton's decode attention of one query a row."""
    rows = torch.arange(setup.rows, dtype=torch.int32, device="cuda")
    positions = torch.full_like(rows, setup.length - 1)
    fewest = choose_plan(setup.head_dim, setup.rows * setup.kv_heads, BF16, setup.dtype, setup.gpu).splits
    splits = choose_splits(setup.rows, setup.kv_heads, setup.gpu.multiprocessors, setup.length, fewest)
    step = DecodeStep(rows, positions, setup.table, splits, setup.gpu)
    query = setup.rotated(setup.rows)
    keys, values = setup.storage.keys, setup.storage.values
    return lambda index: step.run(query, keys[index], values[index], setup.layer, setup.scales)


def pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def microseconds(layer: Layer) -> float:
    def layers() -> None:
        for index in range(LAYERS):
            layer(index)

    return graph_seconds(layers, replays=10) * 1e6 / LAYERS


def measure_prompts(shape: tuple[int, int, int]) -> dict[str, object]:
    """Time every kernel of prompts at every length.

    At one length it is compared with float32.
    """
    found: dict[str, object] = {}
    for tokens in PROMPTS:
        for dtype in (BF16, FP8):
            setup = Setup(*shape, dtype, 1, tokens)
            bits = 8 * dtype.itemsize
            layers: dict[str, Callable[[], Layer]] = {
                "fa2": lambda setup=setup: library_layer(setup, "fa2"),
                "fa3": lambda setup=setup: library_layer(setup, "fa3"),
                "triton": lambda setup=setup: own_layer(setup),
            }
            for name, build in layers.items():
                text = f"prompt of {tokens}, {name} over {bits} bits"
                try:
                    layer = build()
                    found[text] = microseconds(layer)
                    if tokens == CHECKED:
                        exact = setup.exact()
                        error = ((layer(0).float() - exact).square().mean() / exact.square().mean()).sqrt().item()
                        found[f"error of {name} over {bits} bits"] = error
                        print(f"error of {name} over {bits} bits: {error:.4f}", flush=True)
                except (RuntimeError, ValueError, OSError) as error:
                    found[text] = str(error).splitlines()[0][:200]
                print(f"{text}: {found[text]}", flush=True)
    return found


def measure_decode(shape: tuple[int, int, int]) -> dict[str, object]:
    """Time decode attention over 16 and 8 bits."""
    found: dict[str, object] = {}
    for rows, context in DECODES:
        for dtype in (BF16, FP8):
            setup = Setup(*shape, dtype, rows, context)
            text = f"decode of {rows} rows at {context} over {8 * dtype.itemsize} bits"
            found[text] = us = microseconds(decode_layer(setup))
            read = 2 * rows * context * setup.kv_heads * setup.head_dim * dtype.itemsize
            print(f"{text}: {us:.1f}, {read / us / 1e3:.0f} GB/s", flush=True)
    return found


def main() -> None:
    """Measure one shape of heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--only", choices=("prompts", "decode"), help="one of the two parts")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    shape = arguments.heads, arguments.kv_heads, arguments.head_dim
    figures = measure_prompts(shape) if arguments.only != "decode" else {}
    if arguments.only != "prompts":
        figures |= measure_decode(shape)
    if arguments.save:
        config = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
        print(save(arguments.save, config | {"gpu": torch.cuda.get_device_name()}, figures))


if __name__ == "__main__":
    main()
