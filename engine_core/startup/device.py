"""The implementations that differ between devices.

The structure of an engine is the same on every device.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from tandem.engine_core.attention.base import AttentionPlanner
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.config import StepConfig
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, LOWEST_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.speculation.reference import NgramRule
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import torch_build_context, triton_build_context
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import Model
from tandem.engine_core.runtime.captured import (
    NO_GROWTH,
    CudaGraphRecorder,
    DraftPromptGraph,
    GraphRecorder,
    Growth,
    MixedBuffers,
    MixedGraph,
)
from tandem.engine_core.runtime.device import Device, open_device, read_gpu_traits
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.graphs import (
    NO_SIZES,
    GraphSizes,
    StepGraphs,
    capture_decode,
    capture_draft_prompts,
    capture_drafts,
    capture_mixed,
    capture_updates,
    capture_verify,
    max_samples,
)
from tandem.engine_core.runtime.model_drafter import (
    TORCH_DRAFT_KERNELS,
    DraftKernels,
    ModelDrafter,
    triton_draft_kernels,
)
from tandem.engine_core.runtime.row_adapters import RowAdapters
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.speculation import TORCH_KERNELS, Speculator, triton_kernels
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import Sampler
from tandem.engine_core.sampling.scorer import PROMPT_SLICE, TokenScorer, TorchScorer
from tandem.engine_core.sampling.torch_sampler import TorchSampler
from tandem.engine_core.startup.attention import GraphPlanners, eager_planners, further_graph_bytes
from tandem.protocol.installing import install_extra
from tandem.protocol.params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.engine_core.runtime.cuda_forward import CudaForward

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise ConfigError if the compiler of the CUDA kernels is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"--device cuda needs triton, which is not installed; run {install_extra('cuda')}")


def check_gpu(gpu: GpuTraits) -> None:
    """Raise ConfigError for a GPU that is too old for the kernels."""
    if gpu.capability < LOWEST_CAPABILITY:
        raise ConfigError(
            f"--device cuda: the {gpu.name} has compute capability {_version(gpu.capability)}, but the kernels need "
            f"{_version(LOWEST_CAPABILITY)} or higher (Ampere or newer); use such a GPU, or --device cpu"
        )


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def open_parts(kind: str) -> "DeviceParts":
    """Open the device of a resolved kind, "cpu" or "cuda".

    Raises ConfigError if the compiler of the kernels is not installed, the GPU is too old for them or its tile table is
    malformed.
    """
    if kind == "cpu":
        return CpuParts(open_device(kind))
    check_installed()
    try:
        gpu = read_gpu_traits()
    except ValueError as error:
        raise ConfigError(
            f"--device cuda: {error}; restore the file, or delete it and measure again with python -m benchmarks.tune"
        ) from None
    check_gpu(gpu)
    logger.info(
        "%s: compute capability %s, %d multiprocessors, %d bytes of shared memory, programmatic dependent launch %s, "
        "%s",
        gpu.name,
        _version(gpu.capability),
        gpu.multiprocessors,
        gpu.shared_memory,
        "on" if gpu.pdl else "off",
        f"{gpu.tiles.count} tiles measured on such a GPU"
        if gpu.tiles.count
        else "no tile table for such a GPU (python -m benchmarks.tune measures one)",
    )
    return CudaParts(open_device(kind), gpu)


class DeviceParts(Protocol):
    """The implementations for one device."""

    device: Device

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        """Choose the implementations of a model's layers.

        Raises ConfigError for an unsupported quantization or size of heads.
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
        speculator: Speculator | None,
        adapters: RowAdapters | None = None,
    ) -> StepGraphs | None:
        """Capture the graphs of a configuration; return None if it has none.

        progress: called with the percentage done.
        """

    def speculator(self, tables: DeviceTables, rule: NgramRule) -> Speculator:
        """Allocate what drafts n-grams and verifies tokens."""

    def draft_kernels(self) -> DraftKernels:
        """Return the operations on the state of a draft model."""

    def prompt_graph_bytes(self, config: StepConfig, slots: list[StepSlot]) -> int:
        """Return the bytes that the attention of further mixed graphs holds.

        These are all mixed graphs but the largest one in one slot.
        """


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
        return lambda: TorchPlanner(model.attention_kinds)

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        """Implement `DeviceParts.sampler`."""
        return TorchSampler(tables.sampling)

    def scorer(self, vocab_size: int, max_rows: int) -> TokenScorer:
        """Implement `DeviceParts.scorer`."""
        return TorchScorer()

    def graphs(self, *_parts: object) -> None:
        """Implement `DeviceParts.graphs`."""
        return None

    def speculator(self, tables: DeviceTables, rule: NgramRule) -> Speculator:
        """Implement `DeviceParts.speculator`."""
        return Speculator.of_ngrams(tables, rule, TORCH_KERNELS)

    def draft_kernels(self) -> DraftKernels:
        """Implement `DeviceParts.draft_kernels`."""
        return TORCH_DRAFT_KERNELS

    def prompt_graph_bytes(self, *_parts: object) -> int:
        """Implement `DeviceParts.prompt_graph_bytes`."""
        return 0


class CudaParts:
    """Implement `DeviceParts` on CUDA.

    It uses Triton kernels, FlashInfer for ragged attention of shapes that it supports, and CUDA graphs for most steps.
    """

    def __init__(
        self, device: Device, gpu: GpuTraits, new_recorder: Callable[[], GraphRecorder] = CudaGraphRecorder
    ) -> None:
        """Keep a device and its traits.

        new_recorder: makes a recorder of graphs with a memory pool of its own.
        """
        self.device = device
        self.gpu = gpu
        self.new_recorder = new_recorder

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        """Implement `DeviceParts.build_context`."""
        from tandem.engine_core.kernels.paged_pool import check_head_dim

        try:
            check_head_dim(model.head_dim)
        except ValueError as error:
            raise ConfigError(f"--device cuda: {error}; use --device cpu") from None
        return triton_build_context(self.device.torch_device, dtype, self.gpu, model.quantization)

    def check_kv(self, kv_dtype: torch.dtype) -> None:
        """Implement `DeviceParts.check_kv`."""
        if kv_dtype == torch.float8_e4m3fn and self.gpu.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"--kv-dtype fp8: the {self.gpu.name} has compute capability {_version(self.gpu.capability)}, "
                f"but converting fp8 needs {_version(FP8_CAPABILITY)}; use --kv-dtype auto"
            )

    def attention(
        self, model: ModelConfig, config: StepConfig, dtype: torch.dtype, layout: KVLayout
    ) -> Callable[[], AttentionPlanner]:
        """Implement `DeviceParts.attention`."""
        return eager_planners(self.device, self.gpu, model, config, dtype, layout)

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        """Implement `DeviceParts.sampler`."""
        from tandem.engine_core.sampling.triton_sampler import TritonSampler

        return TritonSampler.allocate(tables.sampling, vocab_size, max_rows, self.gpu.pdl)

    def speculator(self, tables: DeviceTables, rule: NgramRule) -> Speculator:
        """Implement `DeviceParts.speculator`."""
        return Speculator.of_ngrams(tables, rule, triton_kernels(self.gpu.pdl))

    def draft_kernels(self) -> DraftKernels:
        """Implement `DeviceParts.draft_kernels`."""
        return triton_draft_kernels(self.gpu.pdl)

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
        speculator: Speculator | None,
        adapters: RowAdapters | None = None,
    ) -> StepGraphs | None:
        """Implement `DeviceParts.graphs`."""
        from tandem.engine_core.runtime.cuda_forward import CudaForward

        if not config.graph_rows:
            return None
        verified = [rows * (1 + drafts) for rows, drafts in config.verify_shapes]

        forward = CudaForward(model, kv, tables, tables.page_tables(kv), self.gpu, speculator, adapters)
        recorder = self.new_recorder()
        with torch.inference_mode():
            rows = config.graph_rows
            shapes = {tokens: config.mixed_rows(tokens) for tokens in config.graph_tokens}
            buckets = [GraphBucket(singles, tokens) for tokens in shapes for singles in shapes[tokens]]
            sample_counts = {bucket: max_samples(bucket, rows, config.max_rows) for bucket in buckets}
            most = max(rows[-1], *sample_counts.values(), *verified, 0)
            logits = self._zeros(config, most, model.config.vocab_size)
            adapted = NO_SIZES
            if adapters is not None:
                tokens_of = {tokens: config.adapted_mixed_rows(tokens) for tokens in config.graph_tokens}
                given_shapes = {tokens: singles for tokens, singles in tokens_of.items() if singles}
                adapted = GraphSizes(config.adapted_graph_rows, given_shapes)
            mixed = self._mixed(
                recorder, config, sample_counts, logits, forward, slots, lambda p: progress(p // 2), adapted
            )
            launch = sampler.launch
            decode = capture_decode(
                recorder,
                rows,
                slots,
                logits,
                forward.decode,
                forward.max_short_len,
                launch,
                lambda p: progress(50 + p // 2),
                dict.fromkeys(adapted.rows, forward.decode_adapted),
            )
            updates = capture_updates(recorder, slots, forward.update_tables)
            verify, growth, draft_prompts = None, NO_GROWTH, None
            if speculator is not None:
                began, free = time.monotonic(), self.device.free_bytes()
                passes = None
                if (drafter := speculator.model) is not None:
                    own = CudaForward(drafter.model, drafter.kv, tables, drafter.page_tables, self.gpu)
                    draft, draw = partial(own.draft, drafter), drafter.sampler.launch
                    passes = capture_drafts(
                        recorder, config.draft_graph_rows, slots, logits, draft, draw, drafter.write
                    )
                    draft_prompts = self._draft_prompts(recorder, config, own, drafter, len(slots))
                given = recorder, config.verify_shapes, slots, logits, forward.verify, launch, speculator.accept
                with_adapters = dict.fromkeys(config.adapted_verify_shapes, forward.verify_adapted)
                verify = capture_verify(*given, with_adapters, passes)
                growth = Growth(time.monotonic() - began, free - self.device.free_bytes())
        return StepGraphs(rows, shapes, decode, mixed, updates, verify, growth, adapted, draft_prompts)

    def _zeros(self, config: StepConfig, *shape: int) -> "Tensor":
        return torch.zeros(shape, dtype=getattr(torch, config.dtype), device=self.device.torch_device)

    def _draft_prompts(
        self,
        recorder: GraphRecorder,
        config: StepConfig,
        forward: "CudaForward",
        drafter: ModelDrafter,
        num_slots: int,
    ) -> list[dict[int, DraftPromptGraph]] | None:
        if not config.draft_prompt_tokens:
            return None
        model, largest = forward.model.config, config.draft_prompt_tokens[-1]
        # A trial captures more slots than the engine has.
        eager = [drafter.planners[number % len(drafter.planners)] for number in range(num_slots)]
        planners = GraphPlanners(self.device, self.gpu, model, config, forward.page_tables, eager)
        inputs = torch.zeros(2, largest, dtype=torch.int32, device=self.device.torch_device)
        attended = self._zeros(config, largest, model.heads, model.head_dim)
        run = partial(forward.draft_prompt, drafter)
        given = config.draft_prompt_tokens, num_slots, inputs, attended, run, planners.of_draft
        return capture_draft_prompts(recorder, *given)

    def _mixed(
        self,
        recorder: GraphRecorder,
        config: StepConfig,
        sample_counts: Mapping[GraphBucket, int],
        logits: "Tensor",
        forward: "CudaForward",
        slots: list[StepSlot],
        progress: Callable[[int], None],
        adapted: GraphSizes,
    ) -> list[dict[GraphBucket, MixedGraph]]:
        if not sample_counts:
            return []
        model = forward.model.config
        eager = [slot.attention for slot in slots]
        prompts = GraphPlanners(self.device, self.gpu, model, config, forward.page_tables, eager)
        largest = max(sum(bucket) for bucket in sample_counts)
        attended = self._zeros(config, largest, model.heads, model.head_dim)
        buffers = MixedBuffers(attended, self._zeros(config, largest, model.hidden_size))
        with_adapters = {
            GraphBucket(singles, tokens): forward.mixed_adapted
            for tokens in adapted.shapes
            for singles in adapted.shapes[tokens]
        }
        given = recorder, sample_counts, slots, logits, forward.mixed, forward.head, prompts, buffers, progress
        return capture_mixed(*given, with_adapters)

    def prompt_graph_bytes(self, config: StepConfig, slots: list[StepSlot]) -> int:
        """Implement `DeviceParts.prompt_graph_bytes`."""
        return further_graph_bytes(config, slots[0].attention)
