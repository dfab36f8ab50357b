"""Memory of the weights of a mixture of experts, as forecast and as allocated."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.models.registry import build_model, open_checkpoint, read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup import runtime as startup_runtime
from tandem.engine_core.startup.device_memory import model_bytes, weight_bytes
from tandem.engine_core.startup.memory_trial import measure_step_bytes
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_moe import fuse_experts, save_random
from tests.fakes.recording_gpu import oracle_attention, oracle_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint


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


@pytest.mark.parametrize("name", ["gptq_zeros", "awq", "packed_zeros"])
def test_int4_experts_count_as_they_are_stored(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"num_hidden_layers": 1, "moe_intermediate_size": 96})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    config = read_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    source = SimpleNamespace(directory=tmp_path, model=config, dtype=torch.bfloat16)
    context = torch_build_context(torch.device("meta"), torch.bfloat16, config.quantization)
    allocated = model_bytes(build_model(config, context, checkpoint=checkpoint))
    counted = weight_bytes(cast(Any, source), checkpoint)
    unread = sum(tensor.nbytes for tensor in checkpoint.tensors.values() if tensor.name.endswith(("g_idx", "_shape")))
    assert counted - unread == pytest.approx(allocated, rel=0.02)


def test_int4_experts_of_a_published_shape_take_little_more_than_half_a_byte(tmp_path: Path) -> None:
    """Qwen3-30B-A3B with scales in float32 and zero points of a byte for each 128 weights."""
    shape = json.loads(Path("benchmarks/shapes/qwen3-30b-a3b/config.json").read_text())
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    (tmp_path / "config.json").write_text(
        json.dumps(shape | {"num_hidden_layers": 4, "quantization_config": quantized})
    )
    config = read_config(tmp_path)
    model = build_model(config, torch_build_context(torch.device("meta"), torch.bfloat16, config.quantization))
    plain = 2 * config.vocab_size * config.hidden_size * 2
    assert (model_bytes(model) - plain) / config.projection_weights == pytest.approx(0.5 + 5 / 128, rel=0.01)


def test_the_trial_of_steps_has_the_experts_of_the_largest_step(tmp_path: Path) -> None:
    """Their scratch grows with the tokens of a step: no served step may route more than the trial did."""
    save_random(tmp_path, {"head_dim": 32, "num_hidden_layers": 2})
    routed, trial, route = list[int](), list[int](), moe.route

    def noted(logits: Any, *given: Any) -> Any:
        routed.append(len(logits))
        return route(logits, *given)

    def measured(*given: Any) -> int:
        routed.clear()
        found = measure_step_bytes(*given)
        trial.append(max(routed))
        return found

    options = EngineOptions(
        model=str(tmp_path), device="cuda", dtype="float32", max_rows=4, max_len=64, kv_tokens=512,
        max_step_tokens=40, graph_rows="1,4", graph_tokens="16", speculate="ngram", speculate_tokens=3,
    )  # fmt: skip
    before = torch.get_num_threads()
    with (
        oracle_attention(),
        patch.object(moe, "route", noted),
        patch.object(startup_runtime, "measure_step_bytes", measured),
        patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"),
    ):
        driven = DrivenEngine.build(options, oracle_parts)
        routed.clear()
        prompts = [list(range(3, 3 + length)) for length in (50, 30, 45, 9)]
        driven.generate(prompts, [SamplingParams(4, temperature=0.0, ignore_eos=True)] * 4)
    torch.set_num_threads(before)
    assert trial == [40] and max(routed) == 40
