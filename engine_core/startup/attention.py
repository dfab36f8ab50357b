"""Choose the kernels for prompt attention on CUDA, in eager steps and in CUDA graphs."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tandem.engine_core.attention.base import AttentionPlanner, GraphPromptPlanner, LayerAttention, kinds_of_attention
from tandem.engine_core.config import StepConfig
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.runtime.graphs import MAX_PROMPTS

if TYPE_CHECKING:
    from tandem.engine_core.attention.flashinfer import FlashInferPlanner, HeadShape
    from tandem.engine_core.attention.triton import RaggedPlanner

logger = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Values of head_dim supported by FlashInfer's kernels."""
FLASHINFER_PAGE_ELEMENTS = 2**32
"""Smallest page stride, in elements, that overflows FlashInfer's 32-bit strides."""
PLANNED_VERSION = "0.6.18"
"""FlashInfer version (prefix) with a planning function that `flashinfer_hopper` can call."""
MAX_PAGE_TABLE_ENTRIES = 2**31 - 1
"""Maximum number of page table entries, given FlashInfer's 32-bit indices."""
HOPPER = 9
"""Major compute capability of the GPUs whose 16-bit prompts FlashInfer serves with fa3."""
FEW_TOKENS = 256
"""Maximum number of prompt tokens for which graphs use Triton.

Triton splits the keys of a tile over several programs; FlashInfer leaves most of the GPU idle for few queries.
128 tokens after 8,064 cached ones take 46 us per layer vs. 113 us (`benchmarks.kernels --only prompt-attention`).
"""


def eager_planners(
    device: Device, gpu: GpuTraits, model: ModelConfig, config: StepConfig, dtype: torch.dtype, layout: KVLayout
) -> Callable[[], AttentionPlanner]:
    """Return a factory of planners for eager steps.

    Each slot needs its own planner. They use FlashInfer if it supports every layer of the model, otherwise Triton.
    """
    kinds = model.attention_kinds
    sorts: set[str] = set()
    load = _kernel_loader(device, model, dtype, layout, sorts)
    entries = (config.max_rows + 1) * sum(columns.count for columns in config.page_columns)
    hopper = gpu.capability[0] == HOPPER
    distinct = kinds_of_attention(kinds)
    obstacle = find_obstacle(model.head_dim, dtype, layout, distinct, load, hopper=hopper, entries=entries)
    if obstacle:
        logger.info("prompts run on Triton instead of FlashInfer: %s", obstacle)
        return lambda: _ragged(device, gpu, model, config)
    from tandem.engine_core.attention.flashinfer import FlashInferPlanner

    kernel = describe_kernel(sorts, dtype, layout)
    logger.info("prompts of more than %d tokens run on FlashInfer: %s", FEW_TOKENS, kernel)
    heads = _heads(model, dtype, layout)
    for_hopper = can_plan_directly(sorts, _version())
    return lambda: FlashInferPlanner.allocate(
        kinds, device.host_buffer, device.torch_device, heads, config.max_rows, config.max_page_entries, for_hopper
    )


def can_plan_directly(sorts: Collection[str], version: str) -> bool:
    """Return True if `flashinfer_hopper` can plan the prompts of graphs.

    sorts: backends of all layers, as in `describe_kernel`; version: of FlashInfer.
    """
    if set(sorts) != {"fa3"}:
        return False
    if not f"{version}.".startswith(f"{PLANNED_VERSION}."):
        logger.info(
            "FlashInfer's version is %s: its `plan` takes the host longer, for steps with prompts, than the part of it "
            "that is called in version %s",
            version or "unknown",
            PLANNED_VERSION,
        )
        return False
    return True


def _version() -> str:
    """Return the version of FlashInfer, "" if unknown."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_obstacle(
    head_dim: int,
    dtype: torch.dtype,
    layout: KVLayout,
    kinds: Sequence[LayerAttention],
    load: Callable[[LayerAttention], object] | None,
    hopper: bool = False,
    entries: int = 1,
) -> str:
    """Return the reason why FlashInfer cannot compute the prompt attention of a model; "" if it can.

    kinds: distinct attention settings of the layers; load: loads, and if needed compiles, the kernel for a kind, or
    raises RuntimeError or OSError; None if FlashInfer is not installed; hopper: True on Hopper GPUs; entries: number of
    page table entries.
    """
    if load is None:
        return "flashinfer is not installed"
    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
    if dtype.itemsize != 2:
        return f"queries in {dtype} are not of a 16-bit dtype"
    if layout.has_scales and hopper:
        return (
            f"over keys in {_name(layout.dtype)} Triton is faster than its fa2 on Hopper, and its fa3 would have to "
            "round queries and attention weights to 8 bits too"
        )
    if layout.page_elements >= FLASHINFER_PAGE_ELEMENTS:
        return f"pages of {layout.page_elements} elements exceed its 32-bit stride; lower --page-size"
    if entries > MAX_PAGE_TABLE_ENTRIES:
        return f"a page table of {entries} entries exceeds its 32-bit numbers; raise --page-size"
    for kind in kinds:
        logger.info(
            "loading FlashInfer's kernel for head_dim %d, window %s, soft cap %s and keys in %s; one that is neither "
            "prebuilt nor in its cache is compiled now, which takes minutes",
            head_dim,
            kind.window,
            kind.softcap,
            _name(layout.dtype),
        )
        try:
            load(kind)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            return (
                f"its kernel for window {kind.window}, soft cap {kind.softcap} and keys in {_name(layout.dtype)} is "
                f"not prebuilt and cannot be compiled ({reason})"
            )
    return ""


def describe_kernel(sorts: Collection[str], dtype: torch.dtype, layout: KVLayout) -> str:
    """Return the FlashInfer backend and the reason, for the log.

    sorts: backends of the layers, "fa2" or "fa3".
    """
    text = f"{' and '.join(sorted(sorts))} with queries in {_name(dtype)}, keys and values in {_name(layout.dtype)}"
    if layout.dtype == dtype:
        return text
    return f"{text}; fa3 would have to round queries and attention weights to 8 bits too"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _heads(model: ModelConfig, dtype: torch.dtype, layout: KVLayout) -> "HeadShape":
    from tandem.engine_core.attention.flashinfer import HeadShape

    stored = None if layout.dtype == dtype else layout.dtype
    return HeadShape(model.heads, model.kv_heads, model.head_dim, dtype, stored)


def _kernel_loader(
    device: Device, model: ModelConfig, dtype: torch.dtype, layout: KVLayout, sorts: set[str]
) -> Callable[[LayerAttention], None] | None:
    """Return a function that loads the kernel for a kind of layer; None if FlashInfer is not installed.

    sorts: the function adds the backend of each loaded kernel.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return None
    from tandem.engine_core.attention.flashinfer import load_kernel

    heads = _heads(model, dtype, layout)
    return lambda kind: sorts.add(load_kernel(kind, device.host_buffer, device.torch_device, heads))


def _ragged(device: Device, gpu: GpuTraits, model: ModelConfig, config: StepConfig) -> "RaggedPlanner":
    from tandem.engine_core.attention.triton import RaggedPlanner
    from tandem.engine_core.kernels.attention.paged_prefill import tile_queries

    queries = tile_queries(model.heads, model.kv_heads, model.head_dim, getattr(torch, config.dtype))
    return RaggedPlanner.allocate(
        device.host_buffer, device.torch_device, gpu, queries, config.max_rows, config.max_step_tokens
    )


class GraphPlanners:
    """Factory of planners for prompts in CUDA graphs, one per slot and number of tokens."""

    def __init__(
        self,
        device: Device,
        gpu: GpuTraits,
        model: ModelConfig,
        config: StepConfig,
        page_tables: Sequence[PageTable],
        eager: list[AttentionPlanner],
    ) -> None:
        """Keep the planners of each slot.

        page_tables: of all rows, by KV group; eager: planner of each slot for eager steps.
        """
        self.gpu = gpu
        self.model = model
        self.config = config
        self.page_tables = page_tables
        self.eager = eager
        self.ragged = [_as_ragged(one) or _ragged(device, gpu, model, config) for one in eager]

    def __call__(self, slot: int, tokens: int) -> GraphPromptPlanner:
        """Return the planner of a slot for graphs with `tokens` prompt tokens."""
        from tandem.engine_core.attention.triton import max_graph_tiles

        rows = min(MAX_PROMPTS, self.config.max_rows)
        if _in_flashinfer(self.eager[slot], tokens):
            from tandem.engine_core.attention.flashinfer import FlashInferGraphPlanner
            from tandem.engine_core.attention.flashinfer_hopper import HopperGraphPlanner

            eager = cast("FlashInferPlanner", self.eager[slot])
            if eager.for_hopper:
                return HopperGraphPlanner.build(eager, rows, tokens, self.page_tables)
            entries = _max_page_entries(self.config)
            return FlashInferGraphPlanner.build(eager, rows, tokens, entries, self.page_tables)
        return self._of_triton(slot, tokens, max_graph_tiles(rows, tokens, self.ragged[slot].queries))

    def of_draft(self, slot: int, tokens: int) -> GraphPromptPlanner:
        """Return the planner of a slot for graphs of a draft model, whose rows may have a single token."""
        from tandem.engine_core.attention.triton import max_tiles

        rows = min(MAX_PROMPTS, self.config.max_rows, tokens)
        return self._of_triton(slot, tokens, max_tiles(rows, tokens, self.ragged[slot].queries))

    def _of_triton(self, slot: int, tokens: int, num_tiles: int) -> GraphPromptPlanner:
        from tandem.engine_core.attention.triton import RaggedGraphPlanner
        from tandem.engine_core.kernels.attention.paged_prefill import choose_splits

        ragged = self.ragged[slot]
        splits = choose_splits(ceil_div(tokens, ragged.queries), self.model.kv_heads, self.gpu.multiprocessors)
        planner = RaggedGraphPlanner.build(ragged, num_tiles, splits, self.page_tables)
        # Capture with padding only: tiles left by an eager step may point beyond the queries of a smaller graph.
        planner.plan([])
        return planner


def further_graph_bytes(config: StepConfig, eager: AttentionPlanner) -> int:
    """Return the bytes held by the planners of all graphs except the largest one of one slot.

    eager: planner of any slot.
    """
    count = config.depth * sum(_in_flashinfer(eager, tokens) for tokens in config.graph_tokens)
    if not count:
        return 0
    from tandem.engine_core.attention.flashinfer import GRAPH_PLAN_BYTES

    planner = cast("FlashInferPlanner", eager)
    tables = 4 * 3 * (MAX_PROMPTS + 1)
    pages = 0 if planner.for_hopper else 4 * sum(_max_page_entries(config))
    return (count - 1) * (len(kinds_of_attention(planner.wrappers)) * (GRAPH_PLAN_BYTES + tables) + pages)


def _as_ragged(eager: AttentionPlanner) -> "RaggedPlanner | None":
    from tandem.engine_core.attention.triton import RaggedPlanner

    return eager if isinstance(eager, RaggedPlanner) else None


def _in_flashinfer(eager: AttentionPlanner, tokens: int) -> bool:
    return _as_ragged(eager) is None and tokens > FEW_TOKENS


def _max_page_entries(config: StepConfig) -> list[int]:
    """Return the maximum number of page table entries of the prompts in a graph, by KV group."""
    rows, longest = min(MAX_PROMPTS, config.max_rows), config.num_pages(config.graph_tokens[-1])
    return [max(rows * columns.pages, longest) for columns in config.page_columns]
