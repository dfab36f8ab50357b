"""Names of KV scales in checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.kv_scales import KEY_NAMES, VALUE_NAMES
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.registry import read_config
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.paged_model import load
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint, set_quantization

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    "ignore": [],
}
LAYERS, HEADS = BASE["num_hidden_layers"], BASE["num_key_value_heads"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random(tmp_path, {})
    return tmp_path


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def place(layer: int, name: str) -> str:
    return f"model.layers.{layer}.self_attn.{name}"


def scales_of(folder: Path) -> list[list[float]]:
    model = load(folder)
    assert isinstance(model, Decoder)
    return model.kv_scales.values.tolist()


@pytest.mark.parametrize(("key", "value"), [*zip(KEY_NAMES, VALUE_NAMES, strict=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tool_s_names_are_read(key: str, value: str, dtype: torch.dtype, folder: Path) -> None:
    expected = []
    for layer in range(LAYERS):
        pair = [0.5 + layer, 0.5 + layer if value == "kv_scale" else 0.25]
        shape = ((), (1,), (1, 1))[layer % 3]
        scales = {place(layer, key): torch.full(shape, pair[0]), place(layer, value): torch.full(shape, pair[1])}
        add(folder, {name: scale.to(dtype) for name, scale in scales.items()})
        expected.append(pair)
    assert scales_of(folder) == expected


def test_a_checkpoint_without_scales_leaves_them_unknown(folder: Path) -> None:
    assert scales_of(folder) == [[0, 0]] * LAYERS


def test_a_missing_scale_is_unknown_even_if_the_other_is_present(folder: Path) -> None:
    add(folder, {place(1, "k_scale"): torch.tensor(0.5)})
    assert scales_of(folder) == [[0, 0], [0.5, 0], *[[0, 0]] * (LAYERS - 2)]


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1), (HEADS, 1, 1)])
def test_the_largest_of_a_layer_s_heads_is_taken(shape: tuple[int, ...], folder: Path) -> None:
    add(folder, {place(0, "v_scale"): torch.arange(1.0, HEADS + 1).view(shape)})
    assert scales_of(folder)[0] == [0, HEADS]


def test_two_names_of_one_scale_are_refused(folder: Path) -> None:
    add(folder, {place(0, "k_scale"): torch.ones(1), place(0, "k_proj.output_scale"): torch.ones(1)})
    with pytest.raises(ConfigError, match=r"twice: \S+k_scale and \S+k_proj\.output_scale"):
        load(folder)


def test_a_scale_for_each_channel_is_refused(folder: Path) -> None:
    add(folder, {place(0, "k_scale"): torch.ones(HEADS * 16)})
    with pytest.raises(ConfigError, match=r"misshaped model\.layers\.0\.self_attn\.k_scale: .*\bscalar\b"):
        load(folder)


def test_an_unknown_scale_is_refused_by_name(folder: Path) -> None:
    add(folder, {place(0, "kv_cache.scale"): torch.ones(1)})
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.0\.self_attn\.kv_cache\.scale"):
        load(folder)


def test_scales_of_queries_and_of_attention_weights_are_not_read(folder: Path) -> None:
    names = ("q_scale", "q_proj.output_scale", "attn.prob_scale", "prob_output_scale")
    add(folder, {place(0, name): torch.ones(1) for name in names})
    assert scales_of(folder) == [[0, 0]] * LAYERS


@pytest.mark.parametrize("groups", [{}, None])
def test_16_bit_weights_with_scales_of_keys_and_values_alone_are_loaded(groups: object, folder: Path) -> None:
    """As written by llm-compressor for a recipe with only a `kv_cache_scheme`."""
    set_quantization(folder, COMPRESSED | {"config_groups": groups})
    add(folder, {place(layer, name): torch.tensor([0.5]) for layer in range(LAYERS) for name in ("k_scale", "v_scale")})
    assert read_config(folder).quantization is None
    assert scales_of(folder) == [[0.5, 0.5]] * LAYERS


@pytest.mark.parametrize("layout", ["fp8_channel", "fp8_compressed_static"])
def test_kv_scales_are_read_with_quantized_weights(layout: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    quantize_checkpoint(tmp_path, LAYOUTS[layout])
    set_quantization(tmp_path, LAYOUTS[layout].config | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"]})
    add(tmp_path, {place(0, "k_proj.output_scale"): torch.tensor([0.5]), place(0, "v_scale"): torch.tensor([2.0])})
    assert scales_of(tmp_path)[0] == [0.5, 2.0]


def test_noise_leaves_scales_unknown(folder: Path) -> None:
    model = load(folder)
    fill_with_noise(model)
    assert model.kv_scales.values.tolist() == [[0, 0]] * LAYERS
