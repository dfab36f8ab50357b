"""What is read from config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.scheme import Int4Scheme
from tandem.engine_core.rope_config import LinearScaling, Llama3Scaling, RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "eos_token_id": [3, 4],
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
    "use_cache": True,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def read(directory: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    config = {key: value for key, value in {**LLAMA, **fields}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_config(directory)


def test_a_plain_config_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        heads=8,
        kv_heads=2,
        head_dim=8,
        max_positions=512,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        attention=(LayerAttention(8**-0.5),) * 2,
        ropes=(RopeConfig(8, 500000.0),),
        eos_ids=(3, 4),
        dtype="bfloat16",
    )


def test_absent_fields_take_their_defaults(tmp_path: Path) -> None:
    config = read(
        tmp_path, num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., eos_token_id=..., torch_dtype=...
    )
    assert (config.kv_heads, config.rms_norm_eps, config.ropes[0].theta) == (8, 1e-6, 10000.0)
    assert (config.eos_ids, config.dtype) == ((2,), None)


def test_a_given_head_dim_need_not_divide_the_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=20).head_dim == 20


def test_the_newer_dtype_field_wins(tmp_path: Path) -> None:
    assert read(tmp_path, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        ([2, 9], {"eos_token_id": 7}, (7, 2, 9)),
        (None, {"do_sample": True}, ()),
    ],
)
def test_end_ids_join_both_files(tmp_path: Path, config_ids: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, generation, eos_token_id=config_ids).eos_ids == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_llama3_rope_is_read_in_each_layout(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read(tmp_path, **fields).ropes == (RopeConfig(8, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),)


def test_linear_rope_is_read(tmp_path: Path) -> None:
    linear = read(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert linear.ropes == (RopeConfig(8, 500000.0, LinearScaling(2.0)),)


def test_the_published_qwen3_config_is_read() -> None:
    assert read_config(SHAPES / "qwen3-4b") == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        max_positions=40960,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        attention=(LayerAttention(128**-0.5),) * 36,
        ropes=(RopeConfig(128, 1e6),),
        eos_ids=(151645,),
        dtype="bfloat16",
        qk_norm=True,
    )


def test_qwen3_head_dim_does_not_follow_from_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"], hidden_size=60).head_dim == 128


def test_a_sliding_window_that_is_switched_off_is_ignored(tmp_path: Path) -> None:
    off = read(tmp_path, architectures=["Qwen3ForCausalLM"], sliding_window=4096, use_sliding_window=False)
    assert off == read(tmp_path, architectures=["Qwen3ForCausalLM"])


@pytest.mark.parametrize(
    ("scaling", "positions", "longest"),
    [
        (None, 512, 0),
        ({"rope_type": "linear", "factor": 4.0}, 512, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 0),
    ],
)
def test_positions_follow_the_rotary_scaling(tmp_path: Path, scaling: Any, positions: int, longest: int) -> None:
    config = read(tmp_path, rope_scaling=scaling)
    assert (config.max_positions, config.longest_context) == (positions, longest)


@pytest.mark.parametrize(("window", "kept"), [(511, 511), (512, None), (4096, None)])
def test_a_window_that_no_sequence_outgrows_is_left_out(tmp_path: Path, window: int, kept: int | None) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=window)
    assert {layer.window for layer in config.attention} == {kept}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window true"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, 'rope_type "ntk"'),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "num_attention_heads 6"),
        ({"head_dim": 7}, "7"),
        ({"eos_token_id": 1000}, "eos_token_id 1000"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_unsupported_and_malformed_fields_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read(tmp_path, **fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_quantization_is_read_from_either_field(name: str, tmp_path: Path) -> None:
    assert read(tmp_path).quantization is None
    found = read(tmp_path, **{name: {"quant_method": "awq", "bits": 4, "group_size": 64}}).quantization
    assert found is not None and found.scheme_for("model.layers.0.mlp.up_proj") == Int4Scheme(
        "awq", 64, symmetric=False
    )


@pytest.mark.parametrize("found", [{}, {"quant_method": "bitsandbytes"}, {"quant_method": 8}])
def test_other_quantizations_are_refused_with_those_that_are_served(found: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\bfp8\b.*\bgptq\b.*\bawq\b.*\bcompressed-tensors\b.*\bmodelopt\b.*\bauto-round\b"
    ) as caught:
        read(tmp_path, quantization_config=found)
    assert str(found.get("quant_method", "unknown")) in str(caught.value)


def test_activation_follows_hidden_act(tmp_path: Path) -> None:
    assert read(tmp_path).activation is Activation.SILU
    assert read(tmp_path, hidden_act="gelu_pytorch_tanh").activation is Activation.GELU_TANH


def test_all_unsupported_fields_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden_act.*sliding_window"):
        read(tmp_path, hidden_act="relu", sliding_window=8)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        read(tmp_path, {"eos_token_id": 1.5})


def test_a_config_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    config = read(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    assert read_config(tmp_path) == config
    (tmp_path / "config.json").write_text(text, encoding="utf-16")
    with pytest.raises(ConfigError, match="UTF-16"):
        read_config(tmp_path)


def test_unknown_architecture_names_the_supported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\bGPT2LMHeadModel\b.*\bFAMILIES\.md"):
        read(tmp_path, architectures=["GPT2LMHeadModel"], vocab_size=..., hidden_act="unheard of")
