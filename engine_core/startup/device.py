"""The implementations that differ between devices.

The structure of an engine is the same on every device.
"""

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tandem.engine_core.attention.base import AttentionPlanner
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.config import StepConfig
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.layers.attention import attention_kinds
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import torch_build_context, triton_build_context
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import Model
from tandem.engine_core.runtime.captured import MixedBuffers, MixedGraph
from tandem.engine_core.runtime.device import Device, GpuClock
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.graphs import StepGraphs, capture_decode, capture_mixed
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import Sampler
from tandem.engine_core.sampling.scorer import PROMPT_SLICE, TokenScorer, TorchScorer
from tandem.engine_core.sampling.torch_sampler import TorchSampler
from tandem.engine_core.startup.attention import GraphPlanners, eager_planners, further_graph_bytes
from tandem.protocol.params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.engine_core.runtime.cuda_forward import CudaForward

logger = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of a GPU that converts to and from e4m3."""


def check_installed() -> None:
    """Raise ConfigError if the compiler of the CUDA kernels is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--device cuda needs triton: pip install 'tandem-llm[cuda]'")


class DeviceParts(Protocol):
    """The implementations for one device."""

    device: Device

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        """Choose the implementations of a model's layers.

        Raises ConfigError for an unsupported quantization.
        """

    def check_kv(self, kv_dtype: torch.dtype) -> None:
        """Check the dtype of keys and values.

        Raises ConfigError for one that the device's kernels cannot read.
        """

    def attention(
        self, model: ModelConfig, config: StepConfig, dtype: torch.dtype, layout: KVLayout
    ) -> Callable[[], AttentionPlanner]:
        """Return a factory of planners for the steps that no graph holds.

        Each slot needs its own.
        """

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        """Allocate the sampler that draws the tokens of every step."""

    def scorer(self, vocab_size: int, max_rows: int) -> TokenScorer:
        """Allocate the scorer that computes log-probabilities."""

    def graphs(
        self,
        config: StepConfig,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        sampler: Sampler,
        slots: list[StepSlot],
        progress: Callable[[int], None],
    ) -> StepGraphs | None:
        """Capture the graphs of a configuration; return None if it has none.

        progress: called with the percentage done.
        """

    def prompt_graph_bytes(self, config: StepConfig, slots: list[StepSlot]) -> int:
        """Return the bytes that the attention of further mixed graphs holds.

        These are all mixed graphs but the largest one in one slot.
        """

    def clock(self) -> GpuClock | None:
        """Return the clock of steps on the device, None on a CPU."""


class CpuParts:
    """Implement `DeviceParts` on a CPU, with torch for everything."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        """Implement `DeviceParts.build_context`."""
        return torch_build_context(self.device.torch_device, dtype, model.quantization)

    def check_kv(self, kv_dtype: torch.dtype) -> None:
        """Implement `DeviceParts.check_kv`."""
        return None

    def attention(
        self, model: ModelConfig, config: StepConfig, dtype: torch.dtype, layout: KVLayout
    ) -> Callable[[], AttentionPlanner]:
        """Implement `DeviceParts.attention`."""
        return lambda: TorchPlanner(attention_kinds(model))

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        """Implement `DeviceParts.sampler`."""
        return TorchSampler(tables.sampling)

    def scorer(self, vocab_size: int, max_rows: int) -> TokenScorer:
        """Implement `DeviceParts.scorer`."""
        return TorchScorer()

    def graphs(self, *_parts: object) -> None:
        """Implement `DeviceParts.graphs`."""
        return None

    def prompt_graph_bytes(self, *_parts: object) -> int:
        """Implement `DeviceParts.prompt_graph_bytes`."""
        return 0

    def clock(self) -> None:
        """Implement `DeviceParts.clock`."""
        return None


class CudaParts:
    """Implement `DeviceParts` on CUDA.

    It uses Triton kernels, FlashInfer for ragged attention of shapes that it supports, and CUDA graphs for most steps.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        """Implement `DeviceParts.build_context`."""
        return triton_build_context(self.device.torch_device, dtype, model.quantization)

    def check_kv(self, kv_dtype: torch.dtype) -> None:
        """Implement `DeviceParts.check_kv`."""
        major, minor = torch.cuda.get_device_capability(self.device.torch_device)
        if kv_dtype == torch.float8_e4m3fn and (major, minor) < FP8_CAPABILITY:
            raise ConfigError(
                f"--kv-dtype fp8 with --device cuda: the GPU's compute capability is {major}.{minor}, "
                f"but converting fp8 needs {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}; use --kv-dtype auto"
            )

    def attention(
        self, model: ModelConfig, config: StepConfig, dtype: torch.dtype, layout: KVLayout
    ) -> Callable[[], AttentionPlanner]:
        """Implement `DeviceParts.attention`."""
        return eager_planners(self.device, model, config, dtype, layout)

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        """Implement `DeviceParts.sampler`."""
        from tandem.engine_core.sampling.triton_sampler import TritonSampler

        return TritonSampler.allocate(tables.sampling, vocab_size, max_rows)

    def scorer(self, vocab_size: int, max_rows: int) -> TokenScorer:
        """Implement `DeviceParts.scorer`."""
        from tandem.engine_core.kernels.sampling.logprobs import TritonScorer

        return TritonScorer(vocab_size, max(max_rows, PROMPT_SLICE), MAX_TOP_LOGPROBS, self.device.torch_device)

    def graphs(
        self,
        config: StepConfig,
        model: Model,
        kv: KVStorage,
        tables: DeviceTables,
        sampler: Sampler,
        slots: list[StepSlot],
        progress: Callable[[int], None],
    ) -> StepGraphs | None:
        """Implement `DeviceParts.graphs`."""
        from tandem.engine_core.runtime.cuda_forward import CudaForward
        from tandem.engine_core.sampling.triton_sampler import TritonSampler

        if not config.graph_rows:
            return None
        assert isinstance(sampler, TritonSampler)

        forward = CudaForward(model, kv, tables, kv.page_table(tables.pages))
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            mixed = self._mixed(pool, config, forward, slots, lambda p: progress(p // 2))
            rows = config.graph_rows
            decode = capture_decode(pool, rows, slots, forward.decode, sampler.launch, lambda p: progress(50 + p // 2))
        return StepGraphs(rows, config.mixed_graph_rows, config.graph_tokens, decode, mixed)

    def _mixed(
        self,
        pool: Any,
        config: StepConfig,
        forward: "CudaForward",
        slots: list[StepSlot],
        progress: Callable[[int], None],
    ) -> list[dict[GraphBucket, MixedGraph]]:
        if not config.graph_tokens:
            return []
        model = forward.model.config
        eager = [slot.attention for slot in slots]
        prompts = GraphPlanners(self.device, model, config, forward.page_table, eager)
        largest = config.mixed_graph_rows[-1] + config.graph_tokens[-1]

        def zeros(*shape: int) -> "Tensor":
            return torch.zeros(shape, dtype=getattr(torch, config.dtype), device=self.device.torch_device)

        buffers = MixedBuffers(zeros(largest, model.heads, model.head_dim), zeros(largest, model.hidden_size))
        return capture_mixed(
            pool, config.mixed_graph_rows, config.graph_tokens, slots, forward.mixed, prompts, buffers, progress
        )

    def prompt_graph_bytes(self, config: StepConfig, slots: list[StepSlot]) -> int:
        """Implement `DeviceParts.prompt_graph_bytes`."""
        return further_graph_bytes(config, slots[0].attention)

    def clock(self) -> GpuClock:
        """Implement `DeviceParts.clock`."""
        return GpuClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
