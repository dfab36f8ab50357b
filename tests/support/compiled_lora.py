"""Launches of kernels of adapters to be compiled by `compiled_kernels`."""

from collections.abc import Iterator
from functools import partial

import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
from tandem.engine_core.kernels.linear.plans import choose, choose_normed
from tandem.engine_core.kernels.linear.shrink_rows import shrink_rows
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterBlocks, AdapterTokens
from tandem.engine_core.kernels.lora.group_tokens import group_tokens
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.lora.low_rank_update import LowRankUpdate
from tandem.engine_core.kernels.lora.shrink_expand import add_lora
from tests.support.compiled_matmuls import Launch, half

SLOTS, MAX_RANK = 8, 64
SHAPES = (
    (28672, 4096, (0, 14336, 28672), True),
    (6144, 4096, (0, 4096, 5120, 6144), False),
    (4096, 14336, (0, 4096), False),
)
"""Outputs, inputs, parts and gate of fused projections."""


def updates(gpu: GpuTraits) -> Iterator[Launch]:
    """The updates of a fused projection of Llama 3.1 8B, for few tokens and for many."""
    starts = (0, 4096, 5120, 6144)
    for count, size in ((1, 16), (40, 64)):
        slots = torch.empty(count * size, dtype=torch.int32)
        blocks = AdapterBlocks(torch.empty(count, size, dtype=torch.int32), torch.empty(count, dtype=torch.int32))
        tokens, x, y = AdapterTokens(slots, blocks), half(count * size, 4096), half(count * size, 6144)
        a, b = half(SLOTS, 3, MAX_RANK, 4096), half(SLOTS, MAX_RANK, 6144)
        ranks = torch.empty(SLOTS + 1, 3, dtype=torch.int32)
        yield partial(group_tokens, slots, SLOTS, gpu.pdl)
        yield partial(add_lora, y, x, tokens, a, b, ranks, starts, gpu.pdl)


def matmuls_with_updates(gpu: GpuTraits, count: int = len(SHAPES)) -> Iterator[Launch]:
    """GEMVs of Llama 3.1 8B that add the updates. count: of the shapes, the gated one first."""
    norm = half(4096), None, half(4096), 1e-5
    slots = torch.empty(1, dtype=torch.int32)
    for outputs, inputs, starts, gated in SHAPES[:count]:
        parts = len(starts) - 1
        a, b = half(SLOTS, parts, MAX_RANK, inputs), half(SLOTS, MAX_RANK, outputs)
        ranks = torch.empty(SLOTS + 1, parts, dtype=torch.int32)
        lora = LoraUpdates(AdapterTokens(slots), a, b, ranks, starts)
        x, weight, activation = half(1, inputs), half(outputs, inputs), Activation.SILU if gated else None
        given = (x, *norm) if inputs == 4096 else (x, None, None, None, 0.0)
        yield partial(shrink_rows, *given, lora, gpu.pdl)
        update = LowRankUpdate(lora, torch.empty(1 if inputs == 4096 else 7, 1, parts * MAX_RANK))
        if inputs == 4096:
            plan = choose_normed(outputs // (1 + gated), inputs, gated, gpu)
            yield partial(normed_gemv, *given, weight, None, plan, activation, gpu.pdl, update)
        else:
            plan = choose(1, outputs, inputs, 2, gpu)
            yield partial(gemv, x, weight, None, plan, activation, gpu.pdl, None, update)
