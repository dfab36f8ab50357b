"""Quantized checkpoints equal their dequantized weights."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Olmo2Config

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.registry import build_model, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import ONLINE_FP8
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support import parity
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens
from tests.support.quantized_checkpoint import GROUP, LAYOUTS, add_biases, gptq, quantize_checkpoint, set_quantization

SHAPES: dict[str, dict[str, Any]] = {
    # Several blocks, the last ones partial, and parts that end within one.
    "fp8_block": {
        "hidden_size": 160,
        "head_dim": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 208,
    },
}
USUAL = {"hidden_size": 64, "intermediate_size": 96}


def logits(directory: Path) -> Tensor:
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    return PagedRun(load(directory), tokens, 4, seed=1).step([(0, 0, 19)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quantized_model_equals_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, SHAPES.get(name, USUAL))
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


def test_parts_that_end_between_two_block_scales_are_not_merged(tmp_path: Path) -> None:
    """Keys of 24 outputs and gates of 40; scales are kept for every 16 outputs."""
    save_random(tmp_path, {"head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40})
    quantize_checkpoint(tmp_path, LAYOUTS["fp8_block"])
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq", "gptq_act_order", "gptq_bytes", "awq"])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_biases_of_layers_without_them_are_left_out(attention_bias: bool, name: str, tmp_path: Path) -> None:
    """AutoGPTQ saves zeros for all layers; the biases that the model has are read."""
    save_random(tmp_path, USUAL | {"attention_bias": attention_bias})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    assert len(add_biases(tmp_path)) == BASE["num_hidden_layers"] * (3 if attention_bias else 7)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("value", [1e-3, -2.0, float("nan"), float("inf")])
def test_biases_that_the_model_has_no_use_for_must_be_0(value: float, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"])
    first = min(add_biases(tmp_path, value))
    with pytest.raises(ConfigError, match=re.escape(f"unexpected {first}: ") + f".*{value:.3g}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["fp8_channel", "gptq_act_order", "awq"])
def test_biases_and_tied_heads_stay_unquantized(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq_act_order", "packed_act_order"])
def test_outputs_of_gate_and_up_are_sorted_as_down_wants_its_inputs(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL | {"mlp_bias": True})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    model = load(tmp_path)
    order = torch.from_numpy(np.random.default_rng(96).permutation(np.arange(96) // GROUP)).argsort(stable=True)
    plain = load(tmp_path / "plain")
    for layer, expected in zip(model.layers, plain.layers, strict=True):
        assert layer.mlp.down.order is None
        x = torch.randn(3, 64)
        gate, up = expected.mlp.gate_up.apply(x).chunk(2, 1)
        sorted_outputs = torch.cat((gate[:, order], up[:, order]), 1)
        torch.testing.assert_close(layer.mlp.gate_up.apply(x), sorted_outputs, atol=1e-4, rtol=0)


def test_a_model_without_norms_before_its_projections_sorts_them_too(tmp_path: Path) -> None:
    parity.save_random(tmp_path, Olmo2Config(**parity.SMALL | USUAL), seed=3)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq_act_order"])
    assert all(layer.mlp.down.order is None for layer in load(tmp_path).layers)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_does_not_depend_on_the_other_rows(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, SHAPES.get(name, USUAL))
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    tokens = random_tokens((9, 9), BASE["vocab_size"], seed=2)
    together = PagedRun(load(tmp_path), tokens, 4, seed=1).step([(0, 0, 9), (1, 0, 9)])
    alone = PagedRun(load(tmp_path), tokens, 4, seed=1).step([(1, 0, 9)])
    torch.testing.assert_close(together[9:], alone, atol=1e-5, rtol=0)


def test_zero_weights_and_the_largest_float8_are_unchanged(tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][:] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][3] = 1e4
    save_file(tensors, path)
    quantize_checkpoint(tmp_path, LAYOUTS["fp8_compressed_static"])
    stored = load_file(path)
    stored["model.layers.0.mlp.up_proj.weight_scale"] = torch.zeros(1)
    stored["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64).to(torch.float8_e4m3fn)
    save_file(stored, path)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    plain["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64)
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    found = logits(tmp_path)
    assert found.isfinite().all()
    torch.testing.assert_close(found, logits(tmp_path / "plain"), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("qweight", lambda old: old[:-1], r"misshaped \S+\.0\.mlp\.up_proj\.qweight: .*\[8, 96\]"),
        ("scales", lambda old: old.repeat(2, 1), r"misshaped \S+\.0\.mlp\.up_proj\.scales: .*\[2, 96\]"),
        ("qzeros", lambda old: old.float(), r"unreadable \S+\.0\.mlp\.up_proj\.qzeros: .*F32\b.* I32\b"),
        (
            "g_idx",
            lambda old: old * 0,
            r"g_idx\b.* 32 inputs\b.* 2 groups\b.* 0 to 0\b",
        ),
        ("g_idx", lambda old: old - 1, r"g_idx\b.* 0 to 1\b.* -1 to 0\b"),
        ("g_idx", lambda old: old + 1, r"g_idx\b.* 0 to 1\b.* 1 to 2\b"),
    ],
)
def test_tensors_that_lie_about_their_groups_are_refused(tensor: str, change: Any, words: str, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, gptq(True, True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for part in ("gate_proj", "up_proj"):
        name = f"model.layers.0.mlp.{part}.{tensor}"
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


def repeat_words(directory: Path, suffix: str, dim: int) -> None:
    """Store twice as many words, as weights of twice the bits have."""
    path = directory / "model.safetensors"
    tensors = {
        name: tensor.repeat_interleave(2, dim) if name.endswith(suffix) else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "suffix", "dim", "field"),
    [("gptq", ".qweight", 0, "bits"), ("awq", ".qweight", 1, "bits"), ("packed", ".weight_packed", 1, "num_bits")],
)
def test_other_bits_than_the_config_says_are_the_cause(
    name: str, suffix: str, dim: int, field: str, tmp_path: Path
) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    repeat_words(tmp_path, suffix, dim)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    first, *examples = str(caught.value).split("\n")
    assert all(word in first for word in (str(tmp_path), suffix, "8 bits", "says 4", f"its {field}"))
    assert [line.split()[0] for line in examples] == ["misshaped"] * 3 + ["and"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp8_block", "FP8"), ("int8", "I8"), ("gptq", "qweight"), ("packed", "weight_packed")],
)
def test_quantized_weights_without_a_quantization_config_are_the_cause(name: str, kind: str, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    layers = sum(key.endswith("_proj.weight") for key in load_file(tmp_path / "plain" / "model.safetensors"))
    set_quantization(tmp_path, None)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    first, *examples = str(caught.value).split("\n")
    assert all(word in first for word in (str(tmp_path), f"{layers} weights", f"({kind})", "no quantization_config"))
    assert len(examples) == 4


@pytest.mark.parametrize("change", [1000, -5])
def test_a_part_with_groups_that_do_not_exist_is_refused(tmp_path: Path, change: int) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, gptq(True, True))
    path, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_proj.g_idx"
    tensors = load_file(path)
    tensors[name][3] += change
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.k_proj\.g_idx\b.* 0 to 1\b"):
        load(tmp_path)


def set_last_scale(directory: Path, factor: float) -> str:
    """Set a scale to the largest number of its dtype times a factor; return the name of its tensor."""
    path, stem = directory / "model.safetensors", "model.layers.1.self_attn.k_proj."
    tensors = load_file(path)
    (name,) = [
        name
        for name in tensors
        if name.startswith(stem) and name.removeprefix(stem) in ("scales", "weight_scale", "weight_scale_inv")
    ]
    tensors[name].view(-1)[-1] = torch.finfo(tensors[name].dtype).max * factor
    save_file(tensors, path)
    return name


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_finite_scales_are_refused(tmp_path: Path, layout: str, factor: float) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS[layout])
    name = set_last_scale(tmp_path, factor)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}: .*\bscales\b.*\bNaN\b"):
        load(tmp_path)


@pytest.mark.parametrize("factor", [0.5, -1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_that_overflow_are_refused(tmp_path: Path, layout: str, factor: float) -> None:
    """They are finite, but the weights or a step may not be."""
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS[layout])
    name = set_last_scale(tmp_path, factor)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}: .*\bscales\b.*\b65504\b"):
        load(tmp_path)


def test_parts_with_different_orders_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, gptq(True, True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.g_idx"] = tensors["model.layers.1.self_attn.k_proj.g_idx"].flip(0)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.qkv_proj: .*\(g_idx\)"):
        load(tmp_path)


def test_a_width_that_is_not_whole_groups_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 72})
    quantize_checkpoint(tmp_path, LAYOUTS["awq"])
    with pytest.raises(ConfigError, match=r"\b72 inputs\b"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["fp8_block", "int8", "gptq_act_order", "packed"])
def test_dummy_weights_are_finite(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, SHAPES.get(name, USUAL))
    set_quantization(tmp_path, LAYOUTS[name].config)
    (tmp_path / "model.safetensors").unlink()
    config = read_config(tmp_path)
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.float32, config.quantization))
    fill_with_noise(model)
    if name == "gptq_act_order":
        assert all(layer.attention.qkv.order is not None for layer in model.layers), "what it costs would not show"
    tokens = random_tokens((5,), BASE["vocab_size"], seed=1)
    assert PagedRun(model, tokens, 4, seed=1).step([(0, 0, 5)]).isfinite().all()


def static_model(directory: Path, scales: dict[str, float]) -> Any:
    """A model with given input scales of the first query, key and value projections, and 0.01 for the rest."""
    save_random(directory, USUAL)
    quantize_checkpoint(directory, LAYOUTS["fp8_tensor_static"])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for part, scale in scales.items():
        tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"].fill_(scale)
    save_file(tensors, path)
    return load(directory)


def test_static_scales_of_inputs_are_read_and_parts_share_the_largest(tmp_path: Path) -> None:
    layers = static_model(tmp_path, {"q": 0.5, "k": 0.25, "v": 0.75}).layers
    assert layers[0].attention.qkv.input_scale.item() == 0.75
    assert layers[0].attention.output.input_scale.item() == pytest.approx(0.01)
    assert layers[1].mlp.gate_up.input_scale.item() == pytest.approx(0.01)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e38, float("inf"), float("nan")])
@pytest.mark.parametrize("others", [0.5, 0.0])
def test_a_static_scale_must_be_a_positive_number(scale: float, others: float, tmp_path: Path) -> None:
    """In any part, though only the maximum of the parts is used."""
    wrong = re.escape(f"{scale:g}") if others else "(0|nan|inf|-0.5|1e\\+38)"
    message = rf"self_attn\.{'k' if others else '[qkv]'}_proj\.input_scale is {wrong}; it must be a positive"
    with pytest.raises(ConfigError, match=message):
        static_model(tmp_path, {"q": others, "k": scale, "v": others})


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_nan_weights_are_not_quantized(damage: float, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = damage
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight: .*\bweights\b.*\bNaN\b"):
        load(tmp_path, quantization=Quantization(ONLINE_FP8))


def test_a_static_checkpoint_without_scales_of_inputs_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, USUAL)
    quantize_checkpoint(tmp_path, LAYOUTS["fp8_tensor_static"])
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("input_scale")}
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"missing model\.layers\.0\.self_attn\.q_proj\.input_scale"):
        load(tmp_path)
