"""Which kernels compute the attention of prompts on CUDA, in steps that no graph holds and in graphs."""

import importlib.util
import logging
from typing import TYPE_CHECKING, cast

import torch

from tandem.engine_core.attention.base import AttentionBackend, PromptAttention
from tandem.engine_core.config import StepConfig
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.runtime.graphs import PROMPTS

if TYPE_CHECKING:
    from tandem.engine_core.attention.flashinfer import FlashInferAttention
    from tandem.engine_core.attention.triton import TritonRagged

logger = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FEW_TOKENS = 256
"""Up to so many, programs that share a tile's positions beat FlashInfer's, whose prompts of few queries leave most of
the device idle: 128 tokens behind 8,064 take 46 us a layer and 113 (`benchmarks.kernels.bench_prompt_attention`)."""


def eager_prompts(
    device: Device, model: ModelConfig, config: StepConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionBackend:
    """For the steps that no graph holds; a new one for each slot."""
    usable = model.head_dim in FLASHINFER_HEAD_DIMS and dtype.itemsize == 2 and kv_dtype == dtype
    if not usable or importlib.util.find_spec("flashinfer") is None:
        logger.info("prefill runs on Triton: head_dim %d, %s, keys in %s", model.head_dim, dtype, kv_dtype)
        return _ragged(device, model, config)
    from tandem.engine_core.attention.flashinfer import FlashInferAttention, Heads

    heads = Heads(model.heads, model.kv_heads, model.head_dim, model.head_dim**-0.5, dtype)
    return FlashInferAttention.allocate(
        device.host_buffer, device.torch_device, heads, config.max_rows, config.max_page_entries, config.page_size
    )


def _ragged(device: Device, model: ModelConfig, config: StepConfig) -> "TritonRagged":
    from tandem.engine_core.attention.triton import TritonRagged
    from tandem.engine_core.kernels.attention.paged_prefill import tile_queries

    queries = tile_queries(model.heads, model.kv_heads, model.head_dim, getattr(torch, config.dtype))
    return TritonRagged.allocate(
        device.host_buffer, device.torch_device, queries, config.max_rows, config.max_step_tokens
    )


class GraphPrompts:
    """Makes the attention of prompts that graphs hold: one for each slot and count of tokens."""

    def __init__(
        self, device: Device, model: ModelConfig, config: StepConfig, pages: torch.Tensor, eager: list[AttentionBackend]
    ) -> None:
        """pages: the page table; eager: of each slot, for the steps that no graph holds."""
        self.device = device
        self.model = model
        self.config = config
        self.pages = pages
        self.eager = eager
        self.ragged = [_as_ragged(one) or _ragged(device, model, config) for one in eager]

    def __call__(self, slot: int, tokens: int) -> PromptAttention:
        from tandem.engine_core.attention.triton import TritonPrompts, graph_tiles
        from tandem.engine_core.kernels.attention.paged_prefill import choose_splits

        rows = min(PROMPTS, self.config.max_rows)
        if _in_flashinfer(self.eager[slot], tokens):
            library = cast("FlashInferAttention", self.eager[slot])
            return library.for_graph(rows, tokens, _table_entries(self.config))
        ragged = self.ragged[slot]
        room = graph_tiles(rows, tokens, ragged.queries)
        sms = torch.cuda.get_device_properties(self.device.torch_device).multi_processor_count
        splits = choose_splits(ceil_div(tokens, ragged.queries), self.model.kv_heads, sms)
        prompts = TritonPrompts(ragged, room, splits, self.pages, self.config.page_size)
        # Captured beside padding alone: what an eager step left in the tiles would lead out of a smaller one.
        prompts.plan([], self.pages, self.config.page_size)
        return prompts


def further_graph_bytes(config: StepConfig, eager: AttentionBackend) -> int:
    """What the attention of all graphs holds beyond that of the largest count of tokens in one slot. eager: of any."""
    count = config.depth * sum(_in_flashinfer(eager, tokens) for tokens in config.graph_tokens)
    if not count:
        return 0
    from tandem.engine_core.attention.flashinfer import GRAPH_PLAN_BYTES

    return (count - 1) * (GRAPH_PLAN_BYTES + 4 * (_table_entries(config) + 3 * (PROMPTS + 1)))


def _as_ragged(eager: AttentionBackend) -> "TritonRagged | None":
    from tandem.engine_core.attention.triton import TritonRagged

    return eager if isinstance(eager, TritonRagged) else None


def _in_flashinfer(eager: AttentionBackend, tokens: int) -> bool:
    return _as_ragged(eager) is None and tokens > FEW_TOKENS


def _table_entries(config: StepConfig) -> int:
    """Most entries of page tables that the prompts in a graph can name."""
    longest = ceil_div(config.graph_tokens[-1], config.page_size)
    return max(min(PROMPTS, config.max_rows) * config.pages_per_row, longest)
