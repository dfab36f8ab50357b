"""Scales, zero points and groups of a checkpoint that a swap refuses before it changes anything."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.startup.served_model import ServedModel
from tandem.engine_core.startup.stage_checkpoint import check_swap
from tests.engine_core.startup.test_quantized_swaps import CASES
from tests.support.quantized_checkpoint import add_biases

LAYER = "model.layers.0."
DOWN = f"{LAYER}mlp.down_proj."
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    base, new = tmp_path / "base", tmp_path / "new"
    base.mkdir()
    CASES[request.param](base, 0)
    shutil.copytree(base, new)
    return base, new


def set_value(folder: Path, name: str, value: float, shape: tuple[int, ...] = ()) -> None:
    """Set the first number of a tensor; one that is not there gets a shape."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.setdefault(name, torch.full(shape, value)).view(-1)[0] = value
    save_file(tensors, path)


def refusal(base: Path, new: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_swap(ServedModel.read(base), new)
    return str(caught.value)


@pytest.mark.parametrize("folders", ["gptq", "experts in gptq"], indirect=True)
def test_a_swap_may_have_or_lack_biases_of_zeros(folders: tuple[Path, Path]) -> None:
    base, new = folders
    name = add_biases(new)[-1]
    check_swap(ServedModel.read(base), new)
    check_swap(ServedModel.read(new), base)
    set_value(new, name, 0.5)
    assert f"unexpected {name}: " in refusal(base, new)


@pytest.mark.parametrize("scale", [NAN, INF, 0.0, 2.0**100, -(2.0**100)])
@pytest.mark.parametrize(
    ("folders", "name"),
    [
        ("fp8_block", f"{DOWN}weight_scale_inv"),
        ("fp8_channel", f"{LAYER}self_attn.q_proj.weight_scale"),
        ("int8", f"{DOWN}weight_scale"),
        ("packed", f"{DOWN}weight_scale"),
        ("experts in fp8_block", f"{LAYER}mlp.experts.1.up_proj.weight_scale_inv"),
        ("hybrid: fp8 blocks", "model.language_model.layers.0.linear_attn.in_proj_z.weight_scale_inv"),
    ],
    indirect=["folders"],
)
def test_unsuitable_scales_are_refused_with_name_and_number(
    folders: tuple[Path, Path], name: str, scale: float
) -> None:
    base, new = folders
    set_value(new, name, scale)
    text = refusal(base, new)
    assert name.replace("model.language_model.", "model.") in text and f"{abs(scale):g}" in text, text


@pytest.mark.parametrize(
    ("folders", "name", "value"),
    [
        ("fp8_tensor_static", f"{DOWN}input_scale", 0.0),
        ("fp8_tensor_static", f"{LAYER}self_attn.k_proj.input_scale", -1.0),
        ("fp8_tensor_static", f"{DOWN}input_scale", 2.0**100),
        ("mixed: fp8 of transformers with static inputs", f"{DOWN}activation_scale", 0.0),
        ("gptq", f"{DOWN}qzeros", 5),
        ("gptq_bytes", f"{DOWN}qzeros", 5),
        ("gptq", f"{DOWN}g_idx", -1),
        ("gptq_act_order", f"{DOWN}g_idx", 1000),
        ("packed_act_order", f"{DOWN}weight_g_idx", 1000),
    ],
    indirect=["folders"],
)
def test_what_loading_would_refuse_is_refused(folders: tuple[Path, Path], name: str, value: float) -> None:
    base, new = folders
    set_value(new, name, value)
    assert name in refusal(base, new)


@pytest.mark.parametrize("folders", ["fp8_block"], indirect=True)
def test_kv_scales_may_come_and_go_with_quantized_weights(folders: tuple[Path, Path]) -> None:
    base, new = folders
    set_value(new, f"{LAYER}self_attn.k_scale", 0.5)
    check_swap(ServedModel.read(base), new)
    check_swap(ServedModel.read(new), base)


@pytest.mark.parametrize("folders", ["fp8_block"], indirect=True)
def test_other_layers_in_16_bits_are_named(folders: tuple[Path, Path]) -> None:
    base, new = folders
    path = new / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.mlp.down_proj"]
    path.write_text(json.dumps(fields))
    text = refusal(base, new)
    assert "quantization" in text and "down_proj" in text, text


@pytest.mark.parametrize("folders", ["fp8_block"], indirect=True)
@pytest.mark.parametrize(("value", "shape"), [(NAN, ()), (INF, (1,)), (-0.5, ()), (0.5, (7,))])
def test_unsuitable_kv_scales_are_refused(folders: tuple[Path, Path], value: float, shape: tuple[int, ...]) -> None:
    base, new = folders
    name = f"{LAYER}self_attn.k_scale"
    set_value(new, name, value, shape)
    text = refusal(base, new)
    assert name in text and (f"{value:g}" in text or str(list(shape)) in text), text


@pytest.mark.parametrize("folders", ["fp8_block"], indirect=True)
def test_scales_of_zero_are_accepted_where_they_say_nothing_new(folders: tuple[Path, Path]) -> None:
    base, new = folders
    for folder in (base, new):
        set_value(folder, f"{DOWN}weight_scale_inv", 0.0)
    set_value(new, f"{LAYER}self_attn.k_scale", 0.0)
    check_swap(ServedModel.read(base), new)
