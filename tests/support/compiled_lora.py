"""Launches of kernels of adapters to be compiled by `compiled_kernels`."""

from collections.abc import Iterator
from functools import partial

import torch

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterBlocks, AdapterTokens
from tandem.engine_core.kernels.lora.group_tokens import group_tokens
from tandem.engine_core.kernels.lora.shrink_expand import add_lora
from tests.support.compiled_matmuls import Launch, half

SLOTS, MAX_RANK = 8, 64


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
