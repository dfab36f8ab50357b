"""Random weights of models without a checkpoint."""

from pathlib import Path

import pytest
import torch

from benchmarks.porting.tiny import save_tiny
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.registry import build_model, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import ONLINE_FP8


@pytest.mark.parametrize("quantize", [False, True])
def test_noise_differs_between_weights_and_is_the_same_each_time(quantize: bool, tmp_path: Path) -> None:
    """Also between the experts of a layer, which share a parameter."""
    save_tiny("Qwen3MoeForCausalLM", tmp_path)
    config, quantization = read_config(tmp_path), Quantization(ONLINE_FP8) if quantize else None
    context = torch_build_context(torch.device("cpu"), torch.float32, quantization)
    models = [build_model(config, context) for _ in range(2)]
    for model in models:
        fill_with_noise(model)
    slots, again = models[0].weight_slots(), models[1].weight_slots()
    for slot, other in zip(slots, again, strict=True):
        assert slot.is_optional or torch.equal(slot.target.float(), other.target.float()), slot.name
    scales = {slot.name: slot.target for slot in slots if slot.target.ndim == 1}
    weights = {slot.name: slot.target.float() for slot in slots if slot.target.ndim == 2}
    down = []
    for layer in (0, 2, 3):
        for expert in range(6):
            name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            down.append(weights[name] * scales[name][:, None] if quantize else weights[name])
    assert len({float(weight.sum()) for weight in down}) == len(down)
    assert all(0.015 < float(weight.std()) < 0.025 for weight in down)
