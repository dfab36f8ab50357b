"""Qwen 3.5: logits equal those of transformers, however a sequence is cut into steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tests.support import parity
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import SMALL, random_tokens, reference_logits, worst
from tests.support.thinned import thinned

QWEN35: dict[str, Any] = SMALL | {
    "head_dim": 32,
    "rms_norm_eps": 1e-4,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "untied_small_eps": {"rms_norm_eps": 1e-6},
    "tied_one_value_head_per_key_head": {"tie_word_embeddings": True, "linear_num_value_heads": 2},
    "three_value_heads_per_key_head": {"linear_num_value_heads": 6, "linear_value_head_dim": 32},
    "attention_first": {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    "biases_and_large_eps": {"attention_bias": True, "rms_norm_eps": 0.05, "num_key_value_heads": 4},
    "wide_convolution_half_turned": {"linear_conv_kernel_dim": 6, "partial_rotary_factor": 0.5},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint with random norms, decays and biases, and return transformers' model."""
    from transformers import Qwen3_5TextConfig

    model = parity.save_random(directory, Qwen3_5TextConfig(**QWEN35 | fields), seed=seed, norms=(-0.5, 0.5))
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


def test_a_chunk_may_end_at_any_offset(tmp_path: Path) -> None:
    """Two chunks and a decoded rest, cut at every offset modulo 64."""
    reference = save_random(tmp_path, {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]})
    (tokens,) = random_tokens((135,), parity.VOCAB, seed=2)
    (expected,) = reference_logits(reference, [tokens])
    model = load(tmp_path)
    for cut in range(1, 65):
        run = PagedRun(model, [tokens], 16, seed=cut)
        work = [(0, 0, cut), (0, cut, 132 - cut), *((0, position, 1) for position in range(132, 135))]
        (found,) = run.run([[part] for part in work])
        assert worst([found], [expected]) < parity.TOLERANCE, cut


def test_rows_do_not_depend_on_the_rows_beside_them(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    model, tokens = load(tmp_path), random_tokens(parity.LENGTHS, parity.VOCAB, seed=4)
    together = PagedRun(model, tokens, 16, seed=1).run(chunked(parity.LENGTHS, parity.PREFILL, 7))
    for index, sequence in enumerate(tokens):
        steps = chunked([len(sequence)], parity.PREFILL[index : index + 1], 7)
        (alone,) = PagedRun(model, [sequence], 16, seed=2).run(steps)
        assert worst([alone], [together[index]]) < 1e-5


@pytest.mark.parametrize("wrapped", [False, True])
def test_tensors_of_images_and_drafts_are_dropped(wrapped: bool, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {})
    tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    config = json.loads(path.read_text())
    tensors["mtp.fc.weight"] = torch.zeros(4, 8)
    if wrapped:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 8)
        architecture = "Qwen3_5ForConditionalGeneration"
        config = {"architectures": [architecture], "model_type": "qwen3_5", "text_config": config}
        config["vision_config"] = {"depth": 1}
        path.write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    parity.check_parity(tmp_path, reference, schedules=[(1000, 16)])


REFUSED = [
    ({"attn_output_gate": False}, "attn_output_gate False .*True"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type sigmoid .*swish"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_pytorch_tanh .*silu"),
    ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types sliding_attention "),
    ({"layer_types": ["full_attention"]}, r"layer_types .* 1\b.* 2 layers"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types .*no full_attention"),
    ({"full_attention_interval": 4}, r"full_attention_interval 4\b.*num_hidden_layers 2\b"),
    ({"linear_num_value_heads": 5}, r"linear_num_value_heads 5\b.*linear_num_key_heads 2\b"),
    ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim 1\b.* 2\b"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    usual = {"num_hidden_layers": 2, "full_attention_interval": 2, "architectures": ["Qwen3_5ForCausalLM"]}
    config = QWEN35 | usual | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem):
        read_config(tmp_path)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """The 27B's, with the fields that published files have."""
    text = {
        "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
        "num_key_value_heads": 4, "output_gate_type": "swish", "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "vision_config": {}}))
    found = read_config(tmp_path)
    assert found.attention_layers == tuple(range(3, 64, 4))
    assert found.ropes[0].rotary_dim == 64
    assert not found.tie_embeddings
    assert found.weight_bytes(2) == pytest.approx(51.25e9 + 2 * 248320 * 5120, rel=0.01)
    state = found.recurrent_row_bytes(2)
    assert state == 48 * (4 * 48 * (128 * 128 + 16 * 128 + 32) + 2 * (32 * 16 * 128 + 19 * 10240))


def test_gates_of_the_state_stay_in_16_bits_if_weights_are_quantized(tmp_path: Path) -> None:
    """`--quantize fp8` and FP8 checkpoints leave out the same parts of a fused projection."""
    reference = save_random(tmp_path, {})
    (tokens,) = random_tokens((40,), parity.VOCAB, seed=2)
    model = load(tmp_path, quantization=FP8_AT_LOAD)
    quantized = {slot.name for slot in model.weight_slots() if slot.parameter.itemsize == 1}
    prefix = "model.layers.0.linear_attn."
    assert {f"{prefix}in_proj_qkv.weight", f"{prefix}in_proj_z.weight", f"{prefix}out_proj.weight"} <= quantized
    assert not {f"{prefix}in_proj_a.weight", f"{prefix}in_proj_b.weight"} & quantized
    (found,) = PagedRun(model, [tokens], 16, seed=1).run([[(0, 0, 40)]])
    (expected,) = reference_logits(reference, [tokens])
    assert (found - expected).abs().mean() < 0.2 * expected.std()
