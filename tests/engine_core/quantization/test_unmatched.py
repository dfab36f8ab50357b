"""Entries of a quantization config that name no module."""

from typing import Any

import pytest

from tandem.engine_core.quantization.reading import read_quantization
from tests.engine_core.quantization.test_formats import AWQ, GPTQ, MODELOPT, byte, compressed, packed

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate", "input_layernorm")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION", "exclude_modules": []}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
PLAIN = {"bits": 16}


def tensors(prefix: str = "model.") -> list[str]:
    names = [f"{prefix}layers.{layer}.{part}.weight" for layer in range(12) for part in PARTS]
    return [*names, f"{prefix}embed_tokens.weight", "lm_head.weight", "model.visual.blocks.0.fc1.weight"]


def listed(config: dict[str, Any], entries: list[str]) -> dict[str, Any]:
    """Return a config with the entries where its tool has them."""
    if config is GPTQ or config is AUTOROUND:
        field, value = ("dynamic", {}) if config is GPTQ else ("extra_config", PLAIN)
        return config | {field: dict.fromkeys(entries, value)}
    if config is MIXED:
        return config | {"quantized_layers": {key: {"quant_algo": "FP8"} for key in entries}}
    named = {"fp8": "ignored_layers", "awq": "modules_to_not_convert", "modelopt": "exclude_modules"}
    return config | {named.get(config["quant_method"], "ignore"): entries}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    ("config", "found", "unmatched"),
    [
        (FP8, ["lm_head", "o_proj", "model.layers.1.mlp", "re:.*down_.*"], ["o_prj", "model.layers.12.mlp"]),
        (FP8, ["model.layers.*.mlp.gate"], ["re:.*mlpp.*"]),
        (packed(), ["model.layers.3.self_attn.q_proj", "re:.*mlp.down_proj"], ["model.layers.3.mlp", "re:.*mlpp.*"]),
        (packed(), ["re:.*visual.*fc1", "model.visual.blocks.0.fc1"], [r"re:.*layers\.12\..*"]),
        (GPTQ, [r"-:.*\.o_proj", r"+:model\.layers\.11\..*"], [r"-:.*\.o_prj", "o_proj"]),
        (AWQ, ["self_attn.o", "mlp.gate."], ["o_prj", "mlp.down."]),
        (MODELOPT, ["lm_head", "*embed*", "model.layers.1*", "*.mlp.gate"], ["*.o_prj", "model.layers.12*"]),
        (MIXED, ["model.layers.0.self_attn.o_proj"], ["model.layers.0.self_attn.o_prj"]),
        (AUTOROUND, ["model.layers.0.mlp.gate", r"layers\.1\."], ["model.layers.0.mlp", r"layers\.12\."]),
    ],
)
def test_they_are_found_in_the_lists_of_each_tool(
    config: dict[str, Any], found: list[str], unmatched: list[str], prefix: str
) -> None:
    quantization = read_quantization(listed(config, [*found, *unmatched]))
    assert quantization is not None
    expected = {entry.removeprefix("-:").removeprefix("+:") for entry in unmatched}
    assert set(quantization.unmatched_entries(tensors(prefix))) == expected


def test_classes_of_modules_are_no_names() -> None:
    config = compressed("float-quantized", byte("float"))
    config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding", "model.layers.0.mlp.dwn_proj"]
    quantization = read_quantization(config)
    assert quantization is not None
    assert quantization.unmatched_entries(tensors()) == ["model.layers.0.mlp.dwn_proj"]
