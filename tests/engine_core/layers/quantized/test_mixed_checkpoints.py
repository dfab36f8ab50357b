"""Checkpoints that leave some layers in 16 bits, or have several formats, as the tools lay them out.

Logits are those of the dequantized weights.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.quantized.int4_linear import Int4Linear
from tandem.engine_core.layers.quantized.w8a16_linear import W8A16Linear
from tandem.engine_core.layers.split_linear import SplitLinear
from tandem.engine_core.layers.torch_linear import CpuLinear
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.registry import build_model, read_config
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens
from tests.support.quantized_checkpoint import (
    GROUP,
    LAYOUTS,
    Layout,
    awq,
    fp8_transformers,
    gptq,
    gptq_bytes,
    packed_tensors,
    quantize_layers,
    set_quantization,
)

USUAL = {"hidden_size": 64, "intermediate_size": 96}
FP8_BLOCK, FP8_TENSOR, PACKED = LAYOUTS["fp8_block"], LAYOUTS["fp8_tensor_static"], packed_tensors(True)
FP8_CHANNEL, AWQ, GPTQ = LAYOUTS["fp8_channel"], awq(), gptq(True, False)
DOWN = "model.layers.0.mlp.down_proj"


def logits(directory: Path) -> Tensor:
    tokens = random_tokens((9,), BASE["vocab_size"], seed=1)
    return PagedRun(load(directory), tokens, 4, seed=1).step([(0, 0, 9)])


def write(
    directory: Path,
    layout: Layout,
    plain: str,
    config: dict[str, Any],
    others: dict[str, Layout] | None = None,
    seed: int = 0,
) -> None:
    """Write a checkpoint with projections in a layout.

    plain: regular expression found in the names of modules that are not quantized; others: layouts of further modules,
    by the end of their names.
    """
    save_random(directory, USUAL, seed=seed)

    def layout_of(module: str) -> Layout | None:
        for name, other in (others or {}).items():
            if module.endswith(name):
                return other
        return None if re.search(plain, module) or not module.endswith("_proj") else layout

    quantize_layers(directory, layout_of, layout.config | config)


def wrap(directory: Path, prefix: str) -> None:
    """Turn a Llama folder into that of a multimodal checkpoint around a Mistral, with a prefix of its text tensors."""
    for folder in (directory, directory / "plain"):
        path = folder / "config.json"
        text = json.loads(path.read_text()) | {"model_type": "mistral", "sliding_window": None}
        outer = {name: text.pop(name) for name in ("quantization_config", "eos_token_id") if name in text}
        outer |= {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
        path.write_text(json.dumps(outer | {"tie_word_embeddings": False}))
        tensors = {
            (prefix + name.removeprefix("model.") if name.startswith("model.") else name): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        tensors["model.vision_tower.patch_conv.weight"] = torch.ones(2)
        save_file(tensors, folder / "model.safetensors")


CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "fp8 with names of modules": (
        FP8_BLOCK,
        r"layers\.0\.self_attn\.o_proj|layers\.1\.mlp\.down_proj",
        {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]},
    ),
    "fp8 with a prefix of several": (FP8_BLOCK, r"layers\.1\.mlp", {"modules_to_not_convert": ["model.layers.1.mlp"]}),
    "fp8 with ignored_layers": (FP8_TENSOR, "v_proj", {"ignored_layers": ["v_proj"]}),
    "fp8 with names of a wrapper": (
        FP8_BLOCK,
        r"layers\.0\.mlp",
        {"modules_to_not_convert": ["model.language_model.layers.0.mlp", "model.visual"]},
    ),
    "fp8 of transformers with static inputs": (
        Layout({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, fp8_transformers),
        r"layers\.0\.mlp\.gate_proj",
        {"modules_to_not_convert": ["model.layers.0.mlp.gate_proj", "model.vision_tower", "lm_head"]},
    ),
    "w4a16 with names": (PACKED, r"0\.self_attn\.q_proj", {"ignore": ["lm_head", "model.layers.0.self_attn.q_proj"]}),
    "w4a16 with expressions": (PACKED, "down_proj", {"ignore": ["lm_head", r"re:.*layers\.\d+\.mlp\.down_proj$"]}),
    "w4a16 with names of a wrapper": (
        PACKED,
        r"layers\.1\.self_attn",
        {"ignore": [f"language_model.model.layers.1.self_attn.{part}_proj" for part in "qkvo"]},
    ),
    "w4a16 with expressions of a wrapper": (
        PACKED,
        r"layers\.1\.self_attn",
        {"ignore": [r"re:model\.language_model\.layers\.1\.self_attn.*", "re:.*lm_head"]},
    ),
    "w4a16 with wrapped modules": (PACKED, r"1\.mlp\.up_proj", {"ignore": ["model.layers.1.mlp.up_proj.linear"]}),
    "gptq with negative rules": (
        GPTQ,
        r"layers\.[12]\.|k_proj",
        {"dynamic": {r"-:.*\.k_proj": {}, r"-:model\.layers\.([1-9]\d*)\..*": {}}},
    ),
    "gptq with blocks": (
        GPTQ,
        "mlp",
        {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["o_proj"]]},
    ),
    "awq with substrings": (AWQ, r"self_attn|0\.mlp\.down", {"modules_to_not_convert": ["self_attn", "0.mlp.down"]}),
    "awq with a trailing dot": (AWQ, r"mlp\.gate\.", {"modules_to_not_convert": ["mlp.gate.", "visual"]}),
    "modelopt with wildcards": (
        LAYOUTS["modelopt"],
        r"layers\.1|0\.mlp\.down",
        {"exclude_modules": ["lm_head", "model.layers.1*", "*.0.mlp.down_proj", "vision_tower*"]},
    ),
    "modelopt with names of a wrapper": (
        LAYOUTS["modelopt"],
        r"0\.mlp",
        {"ignore": ["language_model.model.layers.0.mlp*", "language_model.lm_head"]},
    ),
    "modelopt mixed": (
        LAYOUTS["modelopt"],
        "mlp",
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.layers.{index}.self_attn.{part}_proj": {"quant_algo": "FP8"}
                for index in range(3)
                for part in "qkvo"
            },
        },
    ),
    "autoround": (
        Layout({"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}, GPTQ.write),
        r"0\.self_attn\.v_proj|1\.mlp",
        {
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.layers",
            "extra_config": {
                "model.layers.0.self_attn.v_proj": {"bits": 16, "data_type": "float"},
                r".*layers\.1\.mlp.*": {"bits": 16, "data_type": "float"},
            },
        },
    ),
    "autoround packed as awq": (
        Layout({"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}, AWQ.write),
        r"0\.self_attn\.o_proj",
        {
            "packing_format": "auto_round:auto_awq",
            "extra_config": {"model.language_model.layers.0.self_attn.o_proj": {"bits": 16}},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_checkpoint_equals_its_dequantized_weights(case: str, tmp_path: Path) -> None:
    layout, plain, config = CASES[case]
    write(tmp_path, layout, plain, config)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)
    model = load(tmp_path)
    quantized = [
        linear
        for layer in model.layers  # type: ignore[attr-defined]
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        if isinstance(linear, EightBitLinear | Int4Linear | SplitLinear)
    ]
    assert quantized, "nothing is quantized"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("listed", ["model.", "model.language_model.", "language_model.model."])
def test_prefixes_of_tensors_and_of_rules_are_independent(prefix: str, listed: str, tmp_path: Path) -> None:
    ignored = {"ignore": [f"{listed}layers.0.mlp.down_proj", f"re:{re.escape(listed)}layers.1.self_attn.*"]}
    write(tmp_path, PACKED, r"0\.mlp\.down|1\.self_attn", ignored)
    wrap(tmp_path, prefix)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


def test_groups_of_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    """Names come before the class of modules, and parts of a fused projection may be in different groups."""
    fp8, packed = (layout.config["config_groups"]["group_0"] for layout in (FP8_CHANNEL, PACKED))
    groups = {
        "group_0": packed | {"format": "pack-quantized"},
        "group_1": fp8 | {"targets": ["re:.*self_attn.[qk]_proj$", DOWN], "format": "float-quantized"},
    }
    write(
        tmp_path,
        PACKED,
        "up_proj",
        {"config_groups": groups, "format": "mixed-precision", "ignore": ["re:.*up_proj"]},
        {"q_proj": FP8_CHANNEL, "k_proj": FP8_CHANNEL, DOWN: FP8_CHANNEL},
    )
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)
    assert isinstance(load(tmp_path).layers[0].attention.qkv, SplitLinear)  # type: ignore[attr-defined]


def test_rules_of_gptqmodel_change_the_groups_of_some_layers(tmp_path: Path) -> None:
    wide = gptq(True, False, group=-1)
    dynamic = {r"+:.*\.down_proj": {"group_size": -1}, r".*\.o_proj": {"group_size": -1, "desc_act": False}}
    write(tmp_path, GPTQ, "-", {"dynamic": dynamic}, {"down_proj": wide, "o_proj": wide})
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


def test_rules_of_gptqmodel_change_the_bits_of_some_layers(tmp_path: Path) -> None:
    wide = gptq_bytes(True)
    dynamic = {r"+:.*\.(down|v)_proj": {"bits": 8, "desc_act": True}, r"-:.*\.o_proj": {}}
    write(tmp_path, GPTQ, "o_proj", {"dynamic": dynamic}, {"down_proj": wide, "v_proj": wide})
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)
    layer = load(tmp_path).layers[0]  # type: ignore[attr-defined]
    assert isinstance(layer.mlp.down, W8A16Linear) and isinstance(layer.attention.qkv, SplitLinear)


def test_weights_of_8_bits_with_other_zero_points_are_refused(tmp_path: Path) -> None:
    layout = gptq_bytes(False)
    write(tmp_path, layout, "-", {})
    change_tensors(tmp_path, lambda tensors: tensors | {f"{DOWN}.qzeros": tensors[f"{DOWN}.qzeros"] + 1})
    with pytest.raises(ConfigError, match=rf"{re.escape(DOWN)}\.qzeros: .*\b8 bits\b.*\b128\b"):
        load(tmp_path)


def test_a_head_with_quantized_tensors_is_served(tmp_path: Path) -> None:
    write(tmp_path, FP8_CHANNEL, "-", {"ignore": []}, {"lm_head": FP8_CHANNEL})
    assert isinstance(load(tmp_path).head, EightBitLinear)  # type: ignore[attr-defined]
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


def test_plain_weights_that_the_config_quantizes_are_served_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, FP8_BLOCK, "down_proj", {})
    with caplog.at_level(logging.INFO):
        torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)
    (line,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "stored in 16 bits" in text]
    assert line.startswith("3 linear layers") and DOWN in line


@pytest.mark.parametrize("case", [case for case in CASES if case != "awq with a trailing dot"])
def test_no_entry_of_a_release_is_unmatched(case: str, tmp_path: Path) -> None:
    """Those of a vision tower and of several tokens are not, whether or not the checkpoint has them."""
    layout, plain, config = CASES[case]
    write(tmp_path, layout, plain, config)
    quantization = read_config(tmp_path).quantization
    assert quantization is not None and quantization.unmatched == ()


@pytest.mark.parametrize("has_weights", [True, False])
def test_entries_that_name_no_module_are_logged(
    has_weights: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = ["lm_head", "o_prj", "re:.*mlpp.*", "re:.*vision.*", "re:.*mtp.*", "input_layernorm", "v_proj"]
    write(tmp_path, FP8_BLOCK, "v_proj", {"modules_to_not_convert": listed})
    if has_weights:
        load(tmp_path)
    else:
        (tmp_path / "model.safetensors").unlink()
        config = read_config(tmp_path)
        build_model(config, torch_build_context(torch.device("cpu"), torch.float32, config.quantization))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().endswith(": o_prj, re:.*mlpp.*")


@pytest.mark.parametrize(
    ("layout", "config", "words"),
    [
        (
            FP8_BLOCK,
            {"modules_to_not_convert": [DOWN]},
            [DOWN, "FP8", "weight_scale_inv", f'entry "{DOWN}"'],
        ),
        (PACKED, {"ignore": ["re:.*down_proj"]}, [DOWN, "weight_packed", 'entry "re:.*down_proj"']),
        (GPTQ, {"dynamic": {"-:.*down_proj": {}}}, [DOWN, "qweight", 'entry ".*down_proj"']),
        (AWQ, {"modules_to_not_convert": ["down"]}, [DOWN, "qweight", 'entry "down"']),
        (
            LAYOUTS["modelopt"],
            {"exclude_modules": ["*down_proj"]},
            [DOWN, "FP8", "weight_scale", 'entry "*down_proj"'],
        ),
        (
            LAYOUTS["modelopt"],
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1": {"quant_algo": "FP8"}}},
            ["model.layers.0.self_attn.q_proj", "weight_scale", "not quantize"],
        ),
    ],
)
def test_quantized_tensors_that_the_config_excludes_are_refused(
    layout: Layout, config: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    write(tmp_path, layout, "-", config)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert all(word in str(refused.value) for word in [str(tmp_path), *words])


@pytest.mark.parametrize(
    ("stored", "config", "words"),
    [
        (PACKED, FP8_BLOCK, ["fp8", "weight_packed and weight_scale instead"]),
        (FP8_CHANNEL, GPTQ, ["4 bits (gptq)", "FP8 and weight_scale", "of qweight"]),
        (GPTQ, PACKED, ["4 bits (compressed-tensors)", "qweight instead", "of weight_packed"]),
    ],
)
def test_tensors_of_another_format_than_the_config_names_are_refused(
    stored: Layout, config: Layout, words: list[str], tmp_path: Path
) -> None:
    write(tmp_path, config, "-", {}, {"down_proj": stored})
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert all(word in str(refused.value) for word in [str(tmp_path), DOWN, *words])


def test_the_first_layer_in_four_bit_floats_is_named(tmp_path: Path) -> None:
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}, DOWN: {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    save_random(tmp_path, USUAL)
    set_quantization(tmp_path, config)
    with pytest.raises(ConfigError, match=rf'gives {re.escape(DOWN)} the algorithm "NVFP4"'):
        read_config(tmp_path)


def kinds(directory: Path) -> tuple[type, type]:
    """Build a model without its checkpoint, and return the types of two linear layers."""
    config = read_config(directory)
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.float32, config.quantization))
    fill_with_noise(model)
    tokens = random_tokens((5,), BASE["vocab_size"], seed=1)
    assert PagedRun(model, tokens, 4, seed=1).step([(0, 0, 5)]).isfinite().all()
    mlp = model.layers[0].mlp  # type: ignore[attr-defined]
    return type(mlp.down), type(mlp.gate_up)


def test_the_config_decides_without_tensors_and_the_index_with_their_names(tmp_path: Path) -> None:
    write(tmp_path, FP8_BLOCK, "gate_proj|up_proj", {"modules_to_not_convert": [DOWN, "gate_proj", "up_proj"]})
    names = list(load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    assert kinds(tmp_path) == (CpuLinear, CpuLinear)
    set_quantization(tmp_path, FP8_BLOCK.config)
    assert kinds(tmp_path) == (EightBitLinear, EightBitLinear)
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kinds(tmp_path) == (EightBitLinear, CpuLinear)


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_every_tensor_is_read_or_dropped_by_a_rule_or_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, FP8_CHANNEL, "v_proj", {"ignore": ["lm_head", "re:.*v_proj", "mtp.fc"]})
    dropped = {
        "mtp.fc.weight": torch.ones(2),
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.v_proj.weight_scale": torch.ones(32, 1),
    }
    change_tensors(tmp_path, lambda tensors: tensors | dropped)
    with caplog.at_level(logging.INFO):
        torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)
    assert any("mtp.* (2)" in record.getMessage() for record in caplog.records)
    others = {"model.layers.0.mlp.gate.weight": torch.ones(2), "model.extra": torch.ones(1)}
    change_tensors(tmp_path, lambda tensors: tensors | others)
    with pytest.raises(ConfigError, match=r"unexpected model\.extra") as refused:
        load(tmp_path)
    assert "unexpected model.layers.0.mlp.gate.weight" in str(refused.value)


def test_a_missing_scale_is_listed(tmp_path: Path) -> None:
    write(tmp_path, FP8_CHANNEL, "-", {})
    change_tensors(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != f"{DOWN}.weight_scale"})
    with pytest.raises(ConfigError, match=rf"missing {re.escape(DOWN)}\.weight_scale: expected \[64, 1\]"):
        load(tmp_path)


@pytest.mark.parametrize("scale", [0.0, 1e-23, 1e-42])
@pytest.mark.parametrize("case", ["fp8 with names of modules", "w4a16 with names", "gptq with negative rules"])
def test_scales_of_weights_near_zero_stay_finite(case: str, scale: float, tmp_path: Path) -> None:
    layout, plain, config = CASES[case]
    write(tmp_path, layout, plain, config)

    def shrink(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if "layers.0.mlp" in name and name.rpartition(".")[2] in ("weight_scale_inv", "weight_scale", "scales"):
                tensor.fill_(scale)
        return tensors

    change_tensors(tmp_path, shrink)
    assert logits(tmp_path).isfinite().all()


def test_shards_are_decided_by_their_headers_once_they_are_here(tmp_path: Path) -> None:
    """The index alone does not tell a stray scale of a 16-bit weight from that of a quantized one."""
    write(tmp_path, FP8_CHANNEL, "v_proj", {"ignore": ["lm_head"]})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {
        f"model.layers.{index}.self_attn.v_proj.weight_scale": torch.ones(32, 1) for index in range(3)
    }
    path.unlink()
    shards = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_config(tmp_path).quantization.scheme_for("model.layers.0.self_attn.v_proj")  # type: ignore[union-attr]
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("head", "tensor"), [(GPTQ, "qweight"), (PACKED, "weight_packed"), (FP8_CHANNEL, "weight")])
def test_a_quantized_head_is_not_tied_whatever_the_config_says(head: Layout, tensor: str, tmp_path: Path) -> None:
    save_random(tmp_path, USUAL | {"vocab_size": 160})
    config = head.config | ({"lm_head": True} if head is GPTQ else {"ignore": []})
    quantize_layers(tmp_path, lambda module: head if module.endswith("_proj") or module == "lm_head" else None, config)
    assert f"lm_head.{tensor}" in load_file(tmp_path / "model.safetensors")
    expected = logits(tmp_path / "plain")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    torch.testing.assert_close(logits(tmp_path), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [1, 2])
def test_symmetric_weights_of_the_other_gptq_format_are_refused(stored: int, tmp_path: Path) -> None:
    write(tmp_path, gptq(True, False, version=stored), "-", {})
    set_quantization(tmp_path, gptq(True, False, version=3 - stored).config)
    with pytest.raises(ConfigError, match=r"qzeros.*sym true"):
        load(tmp_path)


def test_shapes_that_a_format_does_not_have_are_refused_by_module(tmp_path: Path) -> None:
    for layout in (GPTQ, gptq_bytes(False)):
        save_random(tmp_path, USUAL | {"intermediate_size": 80})
        (tmp_path / "model.safetensors").unlink()
        set_quantization(tmp_path, layout.config)
        with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.down_proj: .* 80 inputs"):
            build_model(
                read_config(tmp_path),
                torch_build_context(torch.device("meta"), torch.float32, read_config(tmp_path).quantization),
            )


@pytest.mark.parametrize("ignored", [[], [DOWN]])
def test_stray_scales_of_plain_weights_are_logged(
    ignored: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, FP8_BLOCK, re.escape(DOWN), {"modules_to_not_convert": ignored})
    change_tensors(tmp_path, lambda tensors: tensors | {f"{DOWN}.weight_scale_inv": torch.ones(1, 1)})
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert any(f"{DOWN}.weight_scale_inv" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["model.layers.77.mlp.down_proj.input_scale", "model.layers.0.mlp.foo.weight_shape"])
def test_tensors_that_are_not_read_belong_to_a_module(name: str, tmp_path: Path) -> None:
    write(tmp_path, FP8_CHANNEL, "-", {})
    change_tensors(tmp_path, lambda tensors: tensors | {f"{DOWN}.input_scale": torch.ones(1)})
    load(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=re.escape(f"unexpected {name}")):
        load(tmp_path)
