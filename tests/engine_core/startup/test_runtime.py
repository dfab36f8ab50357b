"""A start that runs out of memory after the pool was sized, where an estimate was too low."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.errors import MemoryTooSmallError
from tandem.engine_core.startup.runtime import RuntimeBuilder
from tests.engine_core.runtime.test_recorded_graphs import build
from tests.fakes.recording_gpu import oracle_attention


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
