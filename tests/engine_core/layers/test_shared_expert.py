"""Shared experts: stored with the others if they are alike, and equal to those of transformers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.layers.moe import MixtureOfExperts
from tandem.engine_core.layers.shared_expert import SharedExpert
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.weight_updates.tensors import TensorSpec
from tandem.engine_core.weight_updates.update_slots import UpdateSlots
from tests.engine_core.models import test_qwen3_5_moe, test_qwen3_next
from tests.engine_core.models.test_qwen3_5_moe import PLAIN, PREFIX, split_experts
from tests.support import parity
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens
from tests.support.quantized_checkpoint import LAYOUTS, Layout, awq, gptq, packed_tensors, quantize_layers

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ALIKE = LAYERS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FAMILIES: dict[str, Any] = {"qwen3_5_moe": test_qwen3_5_moe.save_random, "qwen3_next": test_qwen3_next.save_random}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "three_and_a_shared_one": ("qwen3_5_moe", {}),
    "eight_and_a_shared_one": ("qwen3_5_moe", {"num_experts": 33, "num_experts_per_tok": 8}),
    "all_experts": ("qwen3_5_moe", {"num_experts": 4, "num_experts_per_tok": 4, "tie_word_embeddings": True}),
    "ten_and_a_shared_one": ("qwen3_next", {"num_experts": 16, "num_experts_per_tok": 10}),
    "softmax_over_all": ("qwen3_next", {"norm_topk_prob": False, "num_experts_per_tok": 2}),
}


def mixtures(model: Any) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in model.layers]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, fields = MODELS[name]
    reference = FAMILIES[family](tmp_path, ALIKE | fields, seed=len(name))
    assert all(mixture.stacks_shared and mixture.shared is None for mixture in mixtures(load(tmp_path)))
    parity.check_parity(tmp_path, reference, schedules=[(7, 16)])


def test_router_and_weight_of_the_shared_expert_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compared directly: a wrong gate can give plausible text."""
    reference = test_qwen3_5_moe.save_random(tmp_path, ALIKE | {"num_experts": 20})
    x, zeros, config = torch.randn(50, 64), torch.zeros(50, 64), read_config(tmp_path)
    assert config.moe is not None
    norm, kernels = torch.ones(64), torch_kernels()
    for mixture, other in zip(mixtures(load(tmp_path)), reference.model.layers, strict=True):
        given = x, zeros, norm, 1e-6, mixture.router, mixture.top_k, mixture.routing, mixture.switch.flag, None, 0
        normed, _, routed, _ = kernels.norm_and_route(*given, None, False, True)
        with torch.no_grad():
            _, weights, ids = other.mlp.gate(normed)
            share = other.mlp.shared_expert_gate(normed).sigmoid()
        assert torch.equal(routed.ids[:, :-1].long(), ids) and routed.ids[:, -1].eq(20).all()
        torch.testing.assert_close(routed.weights, torch.cat((weights, share), 1), atol=1e-6, rtol=1e-5)


def test_uniform_routing_keeps_the_shared_expert(tmp_path: Path) -> None:
    test_qwen3_5_moe.save_random(tmp_path, ALIKE)
    mixture = mixtures(load(tmp_path))[0]
    x, rows = torch.randn(9, 64), torch.zeros(9, dtype=torch.int32)
    given = x, x, torch.ones(64), 1e-6, mixture.router, mixture.top_k, mixture.routing, mixture.switch.flag, rows, 1
    with mixture.switch.uniform():
        _, _, routed, _ = mixture.kernels.norm_and_route(*given, None, False, True)
    expected = moe.route(moe.uniform_logits(9, 6, 1, x.device), mixture.top_k, mixture.routing)
    assert torch.equal(routed.ids[:, :-1], expected.ids) and routed.ids[:, -1].eq(6).all()


QUANTIZED: dict[str, tuple[Layout, str]] = {
    "fp8 blocks": (LAYOUTS["fp8_block"], PLAIN),
    "fp8 channels": (LAYOUTS["fp8_channel"], PLAIN),
    "fp8 tensors": (LAYOUTS["fp8_tensor_static"], PLAIN),
    "w4a16 with zero points": (packed_tensors(False), PLAIN),
    "gptq": (gptq(True, False), PLAIN),
    "awq": (awq(), PLAIN),
    "fp8 beside 16 bits": (LAYOUTS["fp8_channel"], rf"{PLAIN}|shared_expert\."),
    "16 bits beside int4": (awq(), rf"{PLAIN}|experts"),
    "one projection in 16 bits": (LAYOUTS["fp8_channel"], rf"{PLAIN}|shared_expert\.down"),
}
"""Layout of quantized layers, and expression of the layers that are not."""


@pytest.mark.parametrize("name", QUANTIZED)
def test_it_is_stored_with_the_others_if_all_are_quantized_alike(name: str, tmp_path: Path) -> None:
    layout, plain = QUANTIZED[name]
    fields = {"hidden_size": 160, "num_experts": 4} if name == "fp8 blocks" else {}
    width = 136 if name == "fp8 blocks" else 96
    sizes = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    test_qwen3_5_moe.save_random(tmp_path, LAYERS | sizes | fields)
    if f"{PREFIX}experts.gate_up_proj" in load_file(tmp_path / "model.safetensors"):
        split_experts(tmp_path)

    def layout_of(module: str) -> Layout | None:
        return layout if re.search(r"_proj(_\w+)?$", module) and not re.search(plain, module) else None

    quantize_layers(tmp_path, layout_of, layout.config)
    tokens = random_tokens((40,), parity.VOCAB, seed=1)
    steps = [[(0, 0, 38)], [(0, 38, 1)], [(0, 39, 1)]]
    found, reference = load(tmp_path), load(tmp_path / "plain")
    assert all(mixture.stacks_shared == (plain == PLAIN) for mixture in mixtures(found))
    (one,), (other,) = (PagedRun(model, tokens, 16, seed=1).run(steps) for model in (found, reference))
    torch.testing.assert_close(one, other, atol=5e-4, rtol=0)


def test_it_stays_apart_if_adapters_are_on() -> None:
    context = torch_build_context(torch.device("cpu"), torch.float32)
    given = "mlp.shared_expert", "mlp.experts", ("gate_proj", "up_proj", "down_proj")
    assert context.has_format_of_experts(*given)
    slots = LoraSlots(1, 8, context.kernels.group_tokens)
    assert not replace(context, lora=slots).has_format_of_experts(*given)


def test_it_is_quantized_while_loading_like_the_others(tmp_path: Path) -> None:
    test_qwen3_5_moe.save_random(tmp_path, ALIKE)
    found = mixtures(load(tmp_path, quantization=FP8_AT_LOAD))[0]
    assert found.stacks_shared
    weight = load_file(tmp_path / "model.safetensors")[f"{PREFIX}shared_expert.up_proj.weight"]
    experts: Any = found.experts
    assert experts.gate_up.dtype == torch.float8_e4m3fn
    stored = experts.gate_up[6, 32:].float() * experts.gate_up_scales[13][:, None]
    torch.testing.assert_close(stored, weight, atol=1e-3, rtol=0.07)


@pytest.mark.parametrize("name", ["gate", "shared_expert_gate"])
def test_a_router_or_gate_in_float32_is_not_rounded(name: str, tmp_path: Path) -> None:
    test_qwen3_5_moe.save_random(tmp_path, ALIKE)
    path, name = tmp_path / "model.safetensors", f"{PREFIX}{name}.weight"
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(path).items()}
    tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, path, {"format": "pt"})
    first, second = (mixture.router for mixture in mixtures(load(tmp_path, dtype=torch.bfloat16)))
    both = tensors[f"{PREFIX}gate.weight"].float(), tensors[f"{PREFIX}shared_expert_gate.weight"].float()
    assert torch.equal(first, torch.cat(both)) and second.dtype == torch.bfloat16


def test_tensors_of_gate_and_up_in_one_stay_apart(tmp_path: Path) -> None:
    reference = test_qwen3_5_moe.save_random(tmp_path, ALIKE)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for prefix in [name.removesuffix("gate_proj.weight") for name in tensors if "shared_expert.gate_proj" in name]:
        parts = [tensors.pop(f"{prefix}{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)
    save_file(tensors, path, {"format": "pt"})
    assert all(isinstance(mixture.shared, SharedExpert) for mixture in mixtures(load(tmp_path)))
    parity.check_parity(tmp_path, reference, schedules=[(1000, 16)])


def test_random_weights_and_updates_reach_it_by_name(tmp_path: Path) -> None:
    test_qwen3_5_moe.save_random(tmp_path, ALIKE)
    model = load(tmp_path)
    fill_with_noise(model)
    mixture = mixtures(model)[0]
    experts: Any = mixture.experts
    before, router = experts.gate_up.clone(), mixture.router.clone()
    assert 0.01 < before[6].std() < 0.03 and not torch.equal(before[6], before[5]) and router[6].abs().sum() > 0
    update = UpdateSlots(model.weight_slots(), lambda name: name)
    names = {"shared_expert.up_proj.weight": (32, 64), "shared_expert_gate.weight": (1, 64), "gate.weight": (6, 64)}
    update.check([TensorSpec(f"{PREFIX}{name}", "F32", shape) for name, shape in names.items()])
    for number, (name, shape) in enumerate(names.items()):
        update.write(f"{PREFIX}{name}", torch.full(shape, float(number)))
    assert torch.equal(experts.gate_up[:6], before[:6]) and torch.equal(experts.gate_up[6, :32], before[6, :32])
    assert experts.gate_up[6, 32:].eq(0).all() and mixture.router[6].eq(1).all() and mixture.router[:6].eq(2).all()
