"""What a start logs of its memory, and one that runs out of memory after the pool was sized."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.errors import MemoryTooSmallError
from tandem.engine_core.startup.runtime import RuntimeBuilder
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.engine_core.runtime.test_recorded_graphs import build
from tests.engine_core.test_recurrent_drafts import LAYERS, engine
from tests.fakes.recording_gpu import MEMORY, RecordedGraph, RecordingDevice, oracle_attention
from tests.support.plan_recording import runtime_of
from tests.support.refusals import numbers_in


def failing(error: Exception) -> Any:
    """Have the capture of graphs fail."""
    return patch.object(RuntimeBuilder, "capture_graphs", side_effect=error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["allocator", "driver", "triton"],
)
def test_too_little_memory_for_graphs_is_an_error_of_settings(tmp_path: Path, error: Exception) -> None:
    """Whoever found it: the driver holds the graphs themselves, and knows no OutOfMemoryError."""
    refused = pytest.raises(MemoryTooSmallError, match=r"--gpu-memory\b.*--graph-rows\b")
    with oracle_attention(), failing(error), refused:
        build(tmp_path)


def test_other_failures_of_a_capture_stay_what_they_are(tmp_path: Path) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with oracle_attention(), failing(error), pytest.raises(RuntimeError, match=f"^{error}$"):
        build(tmp_path)


WIDE = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
GRAPH = 2**26
"""Bytes of a graph on the device of the test."""


def test_the_log_has_the_memory_of_states_and_of_graphs_that_verify_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(tmp_path, LAYERS | WIDE | {"max_position_embeddings": 512})
    made, create = list[int](), RecordedGraph.__init__

    def counted(graph: RecordedGraph, *given: Any) -> None:
        made.append(GRAPH)
        create(graph, *given)

    memory = patch.multiple(
        RecordingDevice, free_bytes=lambda _: 64 * MEMORY - sum(made), total_bytes=lambda _: 64 * MEMORY
    )
    fields = {"speculate": "ngram", "speculate_tokens": 3, "kv_tokens": 512}
    counting, info = patch.object(RecordedGraph, "__init__", counted), caplog.at_level(logging.INFO)
    with memory, counting, info, engine(tmp_path, "graphs", **fields) as driven:
        runtime = runtime_of(driven)
    lines = {line.partition(":")[0]: numbers_in(line.partition(":")[2]) for line in caplog.messages}
    layers, checkpoints, mib = runtime.kv.recurrent, runtime.kv.checkpoints, 2**20
    state = sum([tensor.nbytes for layer in layers for tensor in layer.tensors])
    row = state / len(layers[0].base)
    # Of each layer: values, keys, decays and inputs of the convolution of three tokens.
    drafts = 2 * 3 * 4 * (8 * 64 + 2 * 64 + 8 + (8 + 2 * 2) * 64)
    assert lines["recurrent state"] == [round(state / mib, 1), 3, round(row / mib, 1), round(drafts / mib, 1)]
    assert checkpoints is not None
    slots, size = checkpoints.bases.shape[1], checkpoints.bases.nbytes + checkpoints.inputs.nbytes
    total, *rest = lines["checkpoints of the recurrent state"]
    assert total == pytest.approx(size / (2**30 if size >= 2**30 else mib), abs=0.06)
    assert rest == [slots, round(size / slots / mib, 1)]
    graphs = runtime.graphs
    assert graphs is not None
    growth, number = graphs.verify_growth, len(graphs.verify[0])
    assert lines["steps that verify drafts"] == [number, round(growth.seconds, 1), round(growth.bytes / 2**30, 2)]
    assert growth.bytes >= number * 2 * GRAPH and growth.seconds > 0
