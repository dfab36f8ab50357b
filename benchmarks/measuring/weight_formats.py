"""Quantized weight formats for shapes with random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WEIGHTS = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def _compressed(kind: str, name: str) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": _WEIGHTS | {"type": kind},
        "input_activations": _TOKENS | {"type": kind},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _excluding(method: str, exclude: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `quantization_config` that exclude layers."""
    if method == "gptq":
        return {"dynamic": {f"-:{pattern}": {} for pattern in exclude}}
    if method == "awq":
        return {"modules_to_not_convert": list(exclude)}
    names = [f"re:{pattern}" for pattern in exclude]
    return {"modules_to_not_convert" if method == "fp8" else "ignore": ["lm_head", *names]}


FORMATS: dict[str, dict[str, Any] | None] = {
    "16-bit": None,
    "fp8-channel": _compressed("float", "float-quantized"),
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int8": _compressed("int", "int-quantized"),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
"""The `quantization_config` of each format."""


def write_shape(shape: Path, weights: str, out: Path, exclude: Sequence[str] = ()) -> Path:
    """Write the config.json of a shape with a format of FORMATS, and return its directory.

    shape: directory with a config.json; exclude: regular expressions of linear layers that stay in 16 bits, matched
    from the start of their names; with AWQ text within their names.
    """
    config = json.loads((shape / "config.json").read_text())
    quantization = FORMATS[weights]
    if quantization is not None:
        config["quantization_config"] = quantization | _excluding(quantization["quant_method"], exclude)
    directory = out / shape.name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
