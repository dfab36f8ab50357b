"""Formats described in a file next to config.json are read as if they were in config.json."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme

SHAPE = Path("benchmarks/shapes/llama-3.2-1b/config.json")
GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": True, "sym": False, "true_sequential": True}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def projection_scheme(directory: Path) -> Scheme | None:
    quantization = read_config(directory).quantization
    return None if quantization is None else quantization.scheme_for("model.layers.0.mlp.down_proj")


def with_sidecar(directory: Path, name: str, content: Any) -> Path:
    (directory / "config.json").write_bytes(SHAPE.read_bytes())
    (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("name", "content", "scheme"),
    [
        ("quantize_config.json", GPTQ, Int4Scheme("gptq", 32, False, True, 1)),
        ("quantize_config.json", {"quant_method": "awq", **AWQ}, Int4Scheme("awq", 128, False)),
        ("quant_config.json", AWQ, Int4Scheme("awq", 128, False)),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": MODELOPT},
            EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}, None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NO_QUANT"}}, None),
        ("hf_quant_config.json", {"quantization": "none"}, None),
        ("quantize_config.json", GPTQ | {"quant_method": None}, Int4Scheme("gptq", 32, False, True, 1)),
        ("quantize_config.json", {"per_channel": True, "reduce_range": True, "per_model_config": {}}, None),
        ("quant_config.json", {"quant_type": "int8"}, None),
        ("quant_config.json", {}, None),
        ("other_config.json", GPTQ, None),
    ],
)
def test_the_format_is_read_from_a_file_next_to_config_json(
    name: str, content: dict[str, Any], scheme: Scheme | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert projection_scheme(with_sidecar(tmp_path, name, content)) == scheme
    said = f"config.json names no quantization, but {tmp_path / name} does; delete it if the weights are not quantized"
    assert caplog.messages in ([], [said])
    assert scheme is None or caplog.messages


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_config_json_comes_first(name: str, tmp_path: Path) -> None:
    with_sidecar(tmp_path, "quantize_config.json", GPTQ)
    path = tmp_path / "config.json"
    own = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: own}))
    assert projection_scheme(tmp_path) == EightBitScheme("fp8", Activations.TOKEN)


def test_the_text_half_of_config_json_comes_first_too(tmp_path: Path) -> None:
    """Its errors do not name the sidecar file."""
    with_sidecar(tmp_path, "quantize_config.json", GPTQ)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text()) | {"model_type": "mistral", "quantization_config": {"quant_method": "exl2"}}
    nested = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    path.write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match='quant_method "exl2"') as raised:
        read_config(tmp_path)
    assert "quantize_config.json" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, 'quant_algo is "NVFP4"'),
        ("quantize_config.json", GPTQ | {"bits": 3}, "3 bits"),
        ("quantize_config.json", [], "Expected `object`"),
    ],
)
def test_what_is_not_served_is_refused_with_the_name_of_the_file(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(with_sidecar(tmp_path, name, content))
    assert name in str(raised.value)
    assert message in str(raised.value)
