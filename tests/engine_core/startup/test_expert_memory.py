"""Memory of the weights of a mixture of experts, as forecast and as allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.models.registry import build_model, open_checkpoint, read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.startup.device_memory import weight_bytes
from tests.engine_core.models.test_qwen3_moe import fuse_experts, save_random


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_all_experts_count_as_they_are_stored(fused: bool, quantize: bool, tmp_path: Path) -> None:
    save_random(tmp_path, {"num_hidden_layers": 1})
    if fused:
        fuse_experts(tmp_path, 0)
    config, quantization = read_config(tmp_path), FP8_AT_LOAD if quantize else None
    source = SimpleNamespace(
        directory=tmp_path, model=structs.replace(config, quantization=quantization), dtype=torch.bfloat16
    )
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.bfloat16, quantization))
    slots = [slot for slot in model.weight_slots() if not slot.is_optional]
    stored = {slot.parameter.data_ptr(): slot.parameter.nbytes for slot in slots}
    scales = {
        slot.parameter.data_ptr(): slot.parameter.nbytes for slot in slots if slot.parameter.dtype == torch.float32
    }
    total = weight_bytes(cast(Any, source), open_checkpoint(tmp_path, config))
    assert total == sum(stored.values()) - sum(scales.values())
    assert config.moe is not None
    if not quantize:
        about = config.weight_bytes(2)
        assert abs(about - total) < 0.01 * about
