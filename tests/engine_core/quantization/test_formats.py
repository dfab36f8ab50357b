"""Every field of a `quantization_config` is read, or rejected by name."""

from typing import Any

import pytest

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.quantization.reading import read_quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, W8A16Scheme
from tests.support.quantized_checkpoint import LAYOUTS

QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "lm_head": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*embed*"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def packed(**weights: Any) -> dict[str, Any]:
    return compressed(
        "pack-quantized", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128} | weights
    )


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def with_outputs(config: dict[str, Any]) -> dict[str, Any]:
    group = config["config_groups"]["group_0"] | {"output_activations": byte("float", "tensor")}
    return config | {"config_groups": {"group_0": group}}


def byte(kind: str, strategy: str = "channel", **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": 8, "strategy": strategy} | more


def inputs(kind: str, strategy: str, dynamic: bool) -> dict[str, Any]:
    return byte(kind, strategy, dynamic=dynamic)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (QWEN3_FP8, EightBitScheme("fp8", Activations.TOKEN, "weight_scale_inv", block=(128, 128))),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            EightBitScheme("fp8", Activations.TENSOR, per_tensor=True),
        ),
        (GPTQ | {"format": "gptq_v2"}, Int4Scheme("gptq", 128, True, True)),
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, Int4Scheme("gptq", 128, True, True, 1)),
        (
            GPTQ | {"rotation": None, "adapter": {}, "is_marlin_format": False, "meta": {"quantizer": ["x"]}},
            Int4Scheme("gptq", 128, True, True, 1),
        ),
        (AWQ | {"format": "gemm"}, Int4Scheme("awq", 128, False)),
        (
            packed()
            | {
                "transform_config": {"config_groups": {}},
                "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
            },
            Int4Scheme("compressed-tensors", 128, True),
        ),
        (MODELOPT, EightBitScheme("fp8", Activations.STATIC, per_tensor=True)),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, EightBitScheme("fp8", Activations.TOKEN)),
        (
            compressed("float-quantized", byte("float"), inputs("float", "token", True)),
            EightBitScheme("fp8", Activations.TOKEN),
        ),
        (
            compressed("float-quantized", byte("float", "tensor"), inputs("float", "tensor", False)),
            EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
        ),
        (
            compressed(
                "float-quantized",
                byte("float", "block", block_structure=[128, 128]),
                inputs("float", "group", True),
            ),
            EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
        ),
        (compressed("naive-quantized", byte("float")), EightBitScheme("fp8", Activations.UNQUANTIZED)),
        (
            compressed("int-quantized", byte("int"), inputs("int", "token", True)),
            EightBitScheme("int8", Activations.TOKEN),
        ),
        (
            compressed("int-quantized", byte("int", "tensor"), inputs("int", "tensor", True)),
            EightBitScheme("int8", Activations.TENSOR, per_tensor=True),
        ),
        (GPTQ, Int4Scheme("gptq", 128, True, True, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, Int4Scheme("gptq", 128, False, True, 0)),
        (GPTQ | {"group_size": -1, "desc_act": False}, Int4Scheme("gptq", None, True, False, 1)),
        (AWQ, Int4Scheme("awq", 128, False)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Int4Scheme("awq", 64, False)),
        (packed(), Int4Scheme("compressed-tensors", 128, True)),
        (packed(symmetric=False, actorder="group"), Int4Scheme("compressed-tensors", 128, False, True)),
        (packed(actorder="weight"), Int4Scheme("compressed-tensors", 128, True)),
        (packed(strategy="channel", group_size=None), Int4Scheme("compressed-tensors", None, True)),
        (GPTQ | {"bits": 8}, W8A16Scheme("int8", "gptq", 128, True, 1)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "desc_act": False, "format": "gptq_v2"},
            W8A16Scheme("int8", "gptq", None),
        ),
        (compressed("pack-quantized", byte("int")), W8A16Scheme("int8", "compressed-tensors", None)),
        (
            compressed("pack-quantized", byte("int", "group", group_size=64, actorder="group")),
            W8A16Scheme("int8", "compressed-tensors", 64, True),
        ),
        (
            compressed("int-quantized", byte("int", "group", group_size=128)),
            W8A16Scheme("int8", None, 128),
        ),
        (compressed("float-quantized", byte("float", "group", group_size=32)), W8A16Scheme("fp8", None, 32)),
        (
            {"quant_method": "auto-round", "bits": 8, "group_size": 128, "sym": True},
            W8A16Scheme("int8", "gptq", 128, zero_offset=1),
        ),
    ],
)
def test_a_config_is_read(config: dict[str, Any], scheme: EightBitScheme | Int4Scheme | W8A16Scheme) -> None:
    found = read_quantization(config)
    assert found is not None and found.scheme_for("model.layers.1.mlp.down_proj") == scheme


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QWEN3_FP8 | {"weight_block_size": [64, 64]}, "weight_block_size is [64, 64], dynamic"),
        (QWEN3_FP8 | {"activation_scheme": "static"}, "static activations"),
        (QWEN3_FP8 | {"activation_scheme": None}, 'activation_scheme is None, "dynamic" or "static"'),
        (QWEN3_FP8 | {"fmt": "e5m2"}, 'fmt is "e5m2", "e4m3"'),
        (GPTQ | {"bits": 3}, "3 bits, 4 or 8"),
        (GPTQ | {"bits": 8, "sym": False}, "8-bit GPTQ, sym: true, sym: false"),
        (AWQ | {"bits": 8}, "8 bits, 4"),
        (GPTQ | {"bits": None}, "bits is None, an integer"),
        (GPTQ | {"group_size": 100}, "groups 100 inputs"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        (GPTQ | {"desc_act": 1}, "desc_act is 1, true or false"),
        (AWQ | {"version": "gemv"}, 'version is "gemv", "gemm"'),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"format": "gemv"}, 'format is "gemv", "gemm"'),
        (GPTQ | {"format": "marlin"}, 'format is "marlin"'),
        (GPTQ | {"rotation": "hadamard"}, 'rotation is "hadamard", none'),
        (GPTQ | {"adapter": {"name": "lora", "rank": 64}}, "adapter is {"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True, false"),
        (
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {},
                "sparsity_config": {"format": "sparse-bitmask"},
            },
            "sparsity_config is",
        ),
        (packed() | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, "transform_config is {"),
        (packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is {"),
        (packed() | {"sparsity_config": "2:4"}, "sparsity_config is"),
        (with_outputs(packed()), "output_activations is {"),
        (packed(num_bits=3), "num_bits is 3"),
        (packed(type="float", group_size=16), "group_0 has 4-bit floats, 16, NVFP4, INT8"),
        (packed(type="float", group_size=32), "group_0 has 4-bit floats, 32, MXFP4, INT8"),
        (packed(type="float", group_size=[16]), "group_0 has 4-bit floats, INT8"),
        (packed(strategy="tensor"), 'strategy is "tensor"'),
        (
            compressed("pack-quantized", byte("int"), inputs("int", "token", True)),
            "packed weights",
        ),
        (compressed("pack-quantized", byte("int", symmetric=False)), "symmetric is False"),
        (compressed("pack-quantized", byte("float")), 'format is "pack-quantized"'),
        (MODELOPT | {"quant_algo": "NVFP4"}, 'quant_algo is "NVFP4", "FP8" or "FP8_PER_CHANNEL_PER'),
        (packed() | {"config_groups": packed()["config_groups"] | {"group_1": {}}}, "group_1.weights is missing"),
        (GPTQ | {"dynamic": {".*down.*": {"bits": 2}}}, "2 bits, 4 or 8"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "an invalid regular expression"),
        (GPTQ | {"dynamic": {".*down.*": 8}}, "is 8, an object"),
        ({"quant_method": "modelopt"}, "quant_algo is missing"),
        (compressed("int-quantized", byte("int", symmetric=False)), "weights.symmetric is False"),
        (
            compressed("int-quantized", byte("int"), byte("int", "token", symmetric=False, dynamic=True)),
            "input_activations.symmetric is False",
        ),
        (compressed("int-quantized", byte("int"), inputs("int", "token", False)), "that the checkpoint holds"),
        (compressed("int-quantized", byte("int"), inputs("float", "token", True)), 'type is "float"'),
        (compressed("float-quantized", byte("float", "block")), "block_structure is missing"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing, an object"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "a list of names"),
        (packed() | {"ignore": ["re:("]}, "an invalid regular expression"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="unquantized") as caught:
        read_quantization(config)
    assert all(word in str(caught.value) for word in words.split(", "))


@pytest.mark.parametrize("fields", [{"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": 8}}])
def test_scales_of_keys_and_values_alone_are_no_quantization_of_weights(fields: dict[str, Any]) -> None:
    for config in ({"quant_algo": None} | fields, {"quant_algo": "NO_QUANT"}):
        assert read_quantization({"quant_method": "modelopt"} | config) is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_without_quantization_has_no_scheme_and_others_have_one(name: str) -> None:
    assert read_quantization(None) is None
    assert read_quantization(LAYOUTS[name].config) is not None
