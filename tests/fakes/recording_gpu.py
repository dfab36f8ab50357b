"""A GPU simulated on the CPU: its graphs are recorded calls, which are repeated over the same memory in each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from tandem.engine_core.attention import triton as triton_attention
from tandem.engine_core.kernels.attention.decode_inputs import decode_inputs_reference
from tandem.engine_core.kernels.attention.paged_prefill import TileShape
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.attention.table_updates import update_tables_reference
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention as reference
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write
from tandem.engine_core.kernels.sampling.gather import gather_samples_reference
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.speculation.reference import NgramRule
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.runtime import cuda_forward
from tandem.engine_core.runtime.captured import Graph
from tandem.engine_core.runtime.device import CpuDevice, Instant
from tandem.engine_core.runtime.model_drafter import TORCH_DRAFT_KERNELS, DraftKernels
from tandem.engine_core.runtime.speculation import TORCH_KERNELS, Speculator
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES, Mode, Sampler
from tandem.engine_core.sampling.scorer import TokenScorer, TorchScorer
from tandem.engine_core.sampling.torch_sampler import TorchSampler
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tandem.engine_core.startup.device import CudaParts
from tandem.engine_core.startup.runtime import RuntimeBuilder
from tests.fakes.gpus import gpu
from tests.fakes.ticking_event import TickingEvent

MEMORY = 2**30
SMALL = gpu("a small GPU", 80, 1)
"""One SM, so that no work is split among programs."""
FULL_NEEDS = RANDOM | TRUNCATES | PENALIZES | BIASED | SUPPRESSES


class RecordedGraph:
    """A call with the tensor that it returned, which each replay overwrites, as in a CUDA graph."""

    def __init__(self, fn: Callable[[], Tensor | None], result: Tensor | None) -> None:
        self.fn = fn
        self.result = result
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        again = self.fn()
        if self.result is not None and again is not None:
            self.result.copy_(again)


class RecordingRecorder:
    """Implement `GraphRecorder` with recorded calls. The result of a recorded call is undefined before the first
    replay."""

    def record(self, fn: Callable[[], Tensor | None]) -> tuple[Graph, Tensor | None]:
        result = fn()
        if result is not None:
            result.fill_(torch.nan)
        return RecordedGraph(fn, result), result

    def synchronize(self) -> None:
        return None


class RecordingDevice(CpuDevice):
    """Device of type cuda whose memory is never used up."""

    kind: Literal["cpu", "cuda"] = "cuda"

    def free_bytes(self) -> int:
        return MEMORY

    def total_bytes(self) -> int:
        return MEMORY

    def held_bytes(self) -> int:
        return 0

    def instant(self) -> Instant:
        return TickingEvent()


class OracleSampler(TritonSampler):
    """The oracle behind the interface of the kernels: a mode, and parameters from tables alone."""

    def __init__(self, tables: SamplingTables) -> None:
        self.tables = tables
        self.oracle = TorchSampler(tables)

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        if batch.allowed is not None and mode is not Mode.MASKED:
            raise ValueError(f"sampling mode {mode.value} ignores masks")
        needs = {Mode.GREEDY: 0, Mode.UNTRUNCATED: RANDOM}.get(mode, FULL_NEEDS)
        self.oracle.sample(replace(batch, needs=needs, longest=self.tables.tokens.shape[1]))


class OracleParts(CudaParts):
    """Parts of a GPU with torch oracles as kernels; its graphs, planners and plans are the real ones."""

    def build_context(self, model: ModelConfig, dtype: torch.dtype) -> BuildContext:
        return torch_build_context(torch.device("cpu"), dtype, model.quantization)

    def sampler(self, tables: DeviceTables, vocab_size: int, max_rows: int) -> Sampler:
        return OracleSampler(tables.sampling)

    def scorer(self, vocab_size: int, max_rows: int) -> TokenScorer:
        return TorchScorer()

    def speculator(self, tables: DeviceTables, rule: NgramRule) -> Speculator:
        return Speculator.of_ngrams(tables, rule, TORCH_KERNELS)

    def draft_kernels(self) -> DraftKernels:
        return TORCH_DRAFT_KERNELS


def oracle_parts(_kind: str) -> CudaParts:
    """Return a small GPU of oracles. Its steps run under `oracle_attention`."""
    return OracleParts(RecordingDevice(), SMALL, RecordingRecorder)


@contextmanager
def without_trial() -> Iterator[None]:
    """Let engines start without a trial of steps and graphs: this GPU's memory is never used up.

    The trial captures the largest graphs ten times, which is most of the start of a small model.
    """
    with patch.object(RuntimeBuilder, "_run_trial", lambda *_: (0, 0)):
        yield


def interpreted_parts(_kind: str) -> CudaParts:
    """Return a small GPU whose kernels Triton interprets."""
    return CudaParts(RecordingDevice(), SMALL, RecordingRecorder)


@contextmanager
def oracle_attention() -> Iterator[None]:
    """Replace the kernels that a forward pass launches itself by oracles."""
    kernels = {"paged_decode": _paged_decode, "paged_prefill": _paged_prefill}
    inputs = {
        "decode_inputs": lambda *given, **_launch: decode_inputs_reference(*given),
        "gather_samples": lambda *given, **_launch: gather_samples_reference(*given),
        "update_tables": update_tables_reference,
    }
    with patch.multiple(triton_attention, **kernels), patch.multiple(cuda_forward, **inputs):
        yield


def _paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, table: PageTable, scale: float,
    _splits: int, *, window: int | None, softcap: float | None, out: Tensor | None, scales: Tensor | None,
    rotation: Rotation | None, **_launch: Any,
) -> Tensor:  # fmt: skip
    if rotation is not None:
        cos, sin, slots, *norms = rotation
        query = qk_norm_rope_and_kv_write(query, cos, sin, slots, keys, values, *norms, scales)
    found = reference.paged_decode(query, keys, values, rows, positions, table, scale, window, softcap)
    return found if out is None else out.copy_(found)


def _paged_prefill(
    query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, table: PageTable, scale: float, _splits: int,
    *, window: int | None, softcap: float | None, shape: TileShape, out: Tensor | None = None, **_launch: Any,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(query) if out is None else out
    room = max(1, shape.rows // int(triton.next_power_of_2(query.shape[1] // keys.shape[1])))
    for row, first, position, left in tiles.tolist():
        count = min(left, room)
        of_tile = slice(first, first + count)
        given = torch.full((count,), row), torch.arange(position, position + count)
        out[of_tile] = reference.paged_decode(query[of_tile], keys, values, *given, table, scale, window, softcap)
    return out
