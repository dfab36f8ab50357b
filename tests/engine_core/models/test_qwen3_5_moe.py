"""Qwen 3.5 MoE: logits equal those of transformers, from all layouts of the experts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tests.engine_core.models.test_qwen3_5 import QWEN35
from tests.support import parity
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import random_tokens, reference_logits, worst
from tests.support.quantized_checkpoint import LAYOUTS, Layout, awq, gptq, packed_tensors, quantize_layers
from tests.support.thinned import thinned

SIZES: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
FIELDS = {name: value for name, value in QWEN35.items() if name != "intermediate_size"} | SIZES
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied_many_experts": {"tie_word_embeddings": True, "num_experts": 33, "num_experts_per_tok": 8},
    "one_expert_a_token": {"num_experts": 5, "num_experts_per_tok": 1, "linear_num_value_heads": 6},
    "all_experts_wide_shared": {"num_experts": 4, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 72},
    "attention_first": {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    "biases_and_large_eps": {"attention_bias": True, "rms_norm_eps": 0.05, "moe_intermediate_size": 17},
}
PREFIX = "model.layers.0.mlp."


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint with random norms, decays and biases, and return transformers' model."""
    from transformers import Qwen3_5MoeTextConfig

    return save_hybrid(directory, Qwen3_5MoeTextConfig(**FIELDS | fields), seed)


def save_hybrid(directory: Path, config: Any, seed: int) -> Any:
    """Save a random checkpoint of a hybrid with slow decays, and return transformers' model."""
    model = parity.save_random(directory, config, seed=seed, norms=(-0.5, 0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # Those of transformers forget within a few tokens, and hide errors of a state.
                parameter.uniform_(-5.0, -1.0)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), parity.SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    parity.check_parity(tmp_path, save_random(tmp_path, MODELS[name], seed=len(name)), schedules=[schedule])


def test_router_and_shared_expert_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compared directly: a wrong routing or gate can give plausible text."""
    reference = save_random(tmp_path, {"num_experts": 20})
    x, config = torch.randn(50, 64), read_config(tmp_path)
    assert config.moe is not None and config.moe.routing is Routing.TOP_K_SOFTMAX
    for layer, other in zip(load(tmp_path).layers, reference.model.layers, strict=True):
        with torch.no_grad():
            _, weights, ids = other.mlp.gate(x)
            shared = other.mlp.shared_expert_gate(x).sigmoid() * other.mlp.shared_expert(x)
        routed = moe.route(moe.router_logits(x, layer.mlp.router), config.moe.top_k, config.moe.routing)
        assert torch.equal(routed.ids.long(), ids)
        torch.testing.assert_close(routed.weights, weights, atol=1e-6, rtol=1e-5)
        found = moe.with_shared_expert(torch.zeros(50, 64), layer.mlp.shared.run(x, None))
        torch.testing.assert_close(found, shared, atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_the_rows_beside_them(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    model, tokens = load(tmp_path), random_tokens(parity.LENGTHS, parity.VOCAB, seed=4)
    together = PagedRun(model, tokens, 16, seed=1).run(chunked(parity.LENGTHS, parity.PREFILL, 7))
    for index, sequence in enumerate(tokens):
        steps = chunked([len(sequence)], parity.PREFILL[index : index + 1], 7)
        (alone,) = PagedRun(model, [sequence], 16, seed=2).run(steps)
        assert worst([alone], [together[index]]) < 1e-5


def split_experts(folder: Path) -> None:
    """Replace the two tensors of a layer's experts by three of each expert, as quantized releases have them."""
    path, found = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if match is None:
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = (
                {"down_proj": own}
                if match[2] == "down"
                else dict(zip(("gate_proj", "up_proj"), own.chunk(2), strict=True))
            )
            found |= {f"{match[1]}.{expert}.{part}.weight": weight.clone() for part, weight in parts.items()}
    save_file(found, path, {"format": "pt"})


def fuse_experts(folder: Path) -> None:
    """Replace the three tensors of each expert by two of each layer, as 16-bit releases have them."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for prefix in sorted({name.partition("experts.")[0] for name in tensors if ".experts.0." in name}):

        def take(part: str, prefix: str = prefix) -> torch.Tensor:
            names = [f"{prefix}experts.{expert}.{part}_proj.weight" for expert in range(SIZES["num_experts"])]
            return torch.stack([tensors.pop(name) for name in names])

        tensors[f"{prefix}experts.gate_up_proj"] = torch.cat((take("gate"), take("up")), 1)
        tensors[f"{prefix}experts.down_proj"] = take("down")
    save_file(tensors, path, {"format": "pt"})


def wrap(folder: Path) -> None:
    """Turn a text model's folder into one as published, with tensors of images and drafts."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {}}
    outer |= {name: text.pop(name) for name in ("quantization_config",) if name in text}
    outer["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    path.write_text(json.dumps(outer | {"text_config": text}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 8), "mtp.fc.weight": torch.zeros(4, 8)}
    tensors |= {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 8)}
    tensors |= {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(4, 8)}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["fused", "of_each_expert"])
def test_both_layouts_of_a_release_load_without_images_and_drafts(layout: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {})
    names = load_file(tmp_path / "model.safetensors").keys()
    assert (f"{PREFIX}experts.gate_up_proj" in names) != (f"{PREFIX}experts.0.up_proj.weight" in names)
    if layout == "fused" and f"{PREFIX}experts.0.up_proj.weight" in names:
        fuse_experts(tmp_path)
    if layout == "of_each_expert" and f"{PREFIX}experts.gate_up_proj" in names:
        split_experts(tmp_path)
    wrap(tmp_path)
    parity.check_parity(tmp_path, reference, schedules=[(1000, 16)])


PLAIN = r"in_proj_[ab]$|mlp\.gate$|shared_expert_gate$"
LEFT = [
    f"model.language_model.layers.{layer}.{name}"
    for layer in range(3)
    for name in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
]
QUANTIZED = {
    "fp8_block": {"modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc", *LEFT]},
    "fp8_channel": {"ignore": ["lm_head", *LEFT, "re:.*visual.*", "re:^mtp.*"]},
    "modelopt": {"ignore": ["lm_head", "*linear_attn.in_proj_[ab]*", "*mlp.gate", "*shared_expert_gate*", "mtp*"]},
}
"""Layouts of FP8 releases, and their rules."""


INT4: dict[str, tuple[Layout, dict[str, Any]]] = {
    "compressed-tensors": (packed_tensors(True), {"ignore": ["lm_head", *LEFT, "re:.*visual.*"]}),
    "gptq": (gptq(True, False), {"dynamic": {r"-:.*(in_proj_[ab]|mlp\.gate|shared_expert_gate)$": {}}}),
    "awq": (awq(), {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate", "visual"]}),
}
"""Layouts of INT4 releases, and their rules."""


@pytest.mark.parametrize("name", INT4)
def test_int4_releases_have_the_logits_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    save_random(tmp_path, layers | {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32})
    if f"{PREFIX}experts.gate_up_proj" in load_file(tmp_path / "model.safetensors"):
        split_experts(tmp_path)
    layout, rules = INT4[name]

    def layout_of(module: str) -> Layout | None:
        return layout if re.search(r"_proj(_\w+)?$", module) and not re.search(PLAIN, module) else None

    quantize_layers(tmp_path, layout_of, layout.config | rules)
    for folder in (tmp_path, tmp_path / "plain"):
        wrap(folder)
    tokens = random_tokens((40,), parity.VOCAB, seed=1)
    steps = [[(0, 0, 38)], [(0, 38, 1)], [(0, 39, 1)]]
    folders = tmp_path, tmp_path / "plain"
    (found,), (expected,) = (PagedRun(load(folder), tokens, 16, seed=1).run(steps) for folder in folders)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["fp8_channel", "packed"])
def test_experts_in_fused_tensors_stay_in_16_bits_whatever_the_config_says(name: str, tmp_path: Path) -> None:
    """The tensors decide, as of other layers."""
    save_random(tmp_path, {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]})
    if f"{PREFIX}experts.gate_up_proj" not in load_file(tmp_path / "model.safetensors"):
        fuse_experts(tmp_path)
    layout = LAYOUTS[name]
    quantize_layers(tmp_path, lambda module: layout if module.endswith("o_proj") else None, layout.config)
    tokens = random_tokens((40,), parity.VOCAB, seed=1)
    folders = tmp_path, tmp_path / "plain"
    found, expected = (PagedRun(load(folder), tokens, 16, seed=1).step([(0, 0, 40)]) for folder in folders)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_fp8_releases_have_the_logits_of_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    sizes = {"moe_intermediate_size": 136, "shared_expert_intermediate_size": 144, "num_experts": 4}
    save_random(tmp_path, fields | sizes | {"hidden_size": 160})
    if "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors"):
        split_experts(tmp_path)
    layout = LAYOUTS[name]

    def layout_of(module: str) -> Layout | None:
        return layout if re.search(r"_proj(_\w+)?$", module) and not re.search(PLAIN, module) else None

    quantize_layers(tmp_path, layout_of, layout.config | QUANTIZED[name])
    for folder in (tmp_path, tmp_path / "plain"):
        wrap(folder)
    tokens = random_tokens((40,), parity.VOCAB, seed=1)
    steps = [[(0, 0, 38)], [(0, 38, 1)], [(0, 39, 1)]]
    folders = tmp_path, tmp_path / "plain"
    (found,), (expected,) = (PagedRun(load(folder), tokens, 16, seed=1).run(steps) for folder in folders)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)


def test_fp8_at_load_leaves_routers_and_gates_in_16_bits(tmp_path: Path) -> None:
    # All experts of a token, so that rounding cannot change the routing.
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    reference = save_random(tmp_path, {"num_experts": 3} | layers)
    (tokens,) = random_tokens((40,), parity.VOCAB, seed=2)
    model = load(tmp_path, quantization=FP8_AT_LOAD)
    quantized = {slot.name for slot in model.weight_slots() if slot.parameter.itemsize == 1}
    assert {f"{PREFIX}experts.0.up_proj.weight", f"{PREFIX}shared_expert.down_proj.weight"} <= quantized
    assert not {f"{PREFIX}gate.weight", f"{PREFIX}shared_expert_gate.weight"} & quantized
    (found,) = PagedRun(model, [tokens], 16, seed=1).run([[(0, 0, 40)]])
    (expected,) = reference_logits(reference, [tokens])
    assert (found - expected).abs().mean() < 0.2 * expected.std()


def test_a_gate_keeps_its_own_dtype(tmp_path: Path) -> None:
    save_random(tmp_path, {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]})
    path, name = tmp_path / "model.safetensors", f"{PREFIX}shared_expert_gate.weight"
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(path).items()}
    tensors[name] = torch.randn(1, 64)
    save_file(tensors, path, {"format": "pt"})
    first, second = (layer.mlp.shared.gate for layer in load(tmp_path, dtype=torch.bfloat16).layers)
    assert torch.equal(first, tensors[name]) and second.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["shared_expert_gate.weight", "shared_expert.up_proj.weight"])
def test_a_missing_tensor_of_the_shared_expert_is_named(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[PREFIX + name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"missing {PREFIX}{name}"):
        load(tmp_path)


def test_a_published_config_is_read() -> None:
    config = read_config(Path("benchmarks/shapes/qwen3.6-35b-a3b"))
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.width, config.moe.shared_width) == (256, 8, 512, 512)
    assert config.moe.layers == frozenset(range(40)) and config.attention_layers == tuple(range(3, 40, 4))
    head = config.vocab_size * config.hidden_size
    assert 34.4e9 < config.projection_weights + 2 * head < 35.0e9
    assert 2.9e9 < config.active_weights + head < 3.0e9
    state = 4 * 32 * (128 * 128 + 16 * 128 + 32) + 2 * (32 * 16 * 128 + 19 * 8192)
    assert config.recurrent_row_bytes(2) == 30 * state


def test_more_experts_of_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 7}))
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 7\b.*num_experts 6\b"):
        read_config(tmp_path)
