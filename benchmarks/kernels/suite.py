"""What the kernel benchmarks share: model shapes, options, records and H200 limits."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_microseconds
from benchmarks.measuring.linear_layers import Name, Shape

READ_GB_PER_S = 4385.0
"""Read bandwidth of an H200: `torch.sum` over 8 GB."""
PEAK_FLOPS = 790e12
"""16-bit matmul throughput of an H200; 8-bit matmuls reach at most twice that."""
LAYERS = 16
"""Layers in one graph, whose weights or keys exceed the L2 cache."""
COMPILE_PROCESSES = 14

Record = dict[str, Any]
Layer = Callable[[int], object]
"""Launch of one layer's kernels, by the layer's index."""
Job = TypeVar("Job")


@dataclass(frozen=True)
class Model:
    """Shapes of a model's linear layers and attention."""

    linears: dict[Name, Shape]
    """Outputs and inputs."""
    head_dim: int
    heads: int = 32
    kv_heads: int = 8

    @property
    def vocab_size(self) -> int:
        return self.linears["head"][0]


MODELS = {
    "1b": Model(
        {
            "qkv": (3072, 2048),
            "o": (2048, 2048),
            "gate_up": (16384, 2048),
            "down": (2048, 8192),
            "head": (128256, 2048),
        },
        head_dim=64,
    ),
    "4b": Model(
        {
            "qkv": (6144, 2560),
            "o": (2560, 4096),
            "gate_up": (19456, 2560),
            "down": (2560, 9728),
            "head": (151936, 2560),
        },
        head_dim=128,
    ),
    "8b": Model(
        {
            "qkv": (6144, 4096),
            "o": (4096, 4096),
            "gate_up": (28672, 4096),
            "down": (4096, 14336),
            "head": (128256, 4096),
        },
        head_dim=128,
    ),
}
"""Llama-3.2-1B, Qwen3-4B and Llama-3.1-8B."""


@dataclass(frozen=True)
class Options:
    """Command-line options of every benchmark."""

    model: Model
    rows: tuple[int, ...] = ()
    """Row counts to measure; empty for the benchmark's own."""
    sweep: bool = False
    """Time every candidate plan, not only the one the engine chooses."""


def layer_microseconds(layer: Layer) -> float:
    """Time one layer in a CUDA graph of all layers."""
    return graph_microseconds([partial(layer, index) for index in range(LAYERS)])


def random_rows(*shape: int) -> Tensor:
    """Make normal noise on the GPU in bfloat16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def compile_all(compile_one: Callable[[Job], None], jobs: Sequence[Job]) -> None:
    """Compile kernels in parallel processes, to fill Triton's cache."""
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=COMPILE_PROCESSES) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))
