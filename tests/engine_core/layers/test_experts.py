"""Experts in FP8 equal their dequantized weights, and padding gets no experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.moe.routing import Routing
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.loader.weights import fill_with_noise, load_weights
from tandem.engine_core.model_config import MoEConfig
from tandem.engine_core.models.registry import build_model, open_checkpoint, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import ONLINE_FP8
from tests.engine_core.models.test_qwen3_moe import fuse_experts, save_random
from tests.support import parity
from tests.support.paged_model import PagedRun, load
from tests.support.parity import SMALL, random_tokens
from tests.support.quantized_checkpoint import (
    GROUP,
    LAYOUTS,
    Layout,
    add_biases,
    quantize_checkpoint,
    quantize_layers,
    set_quantization,
)

FP8 = ["fp8_tensor_static", "fp8_tensor_dynamic", "fp8_channel", "fp8_block", "modelopt"]
PARTIAL_BLOCKS = {"hidden_size": 160, "head_dim": 48, "moe_intermediate_size": 136, "num_experts": 3}
"""Several blocks, the last ones partial."""


def logits(directory: Path) -> Tensor:
    tokens = random_tokens((19,), SMALL["vocab_size"], seed=1)
    return PagedRun(load(directory), tokens, 4, seed=1).step([(0, 0, 19)])


@pytest.mark.parametrize("name", FP8)
def test_fp8_experts_equal_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, PARTIAL_BLOCKS if name == "fp8_block" else {})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)


def test_fp8_experts_of_mixtral_equal_their_dequantized_weights(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    parity.save_random(tmp_path, MixtralConfig(**SMALL | {"num_local_experts": 3}))
    layout = LAYOUTS["fp8_channel"]

    def layout_of(module: str) -> Layout | None:
        return layout if module.endswith(("_proj", ".w1", ".w2", ".w3")) else None

    quantize_layers(tmp_path, layout_of, layout.config)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)


def test_experts_alone_may_be_left_in_16_bits(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    layout = LAYOUTS["fp8_channel"]
    config = layout.config | {"ignore": ["lm_head", "re:.*experts.*"]}
    quantize_layers(tmp_path, lambda name: layout if "self_attn" in name and "_proj" in name else None, config)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)


INT4 = ["gptq", "gptq_one_group", "gptq_zeros", "awq", "packed", "packed_zeros"]
GROUPS_OF_32 = {"moe_intermediate_size": 96, "num_experts": 4}


@pytest.mark.parametrize("name", INT4)
def test_int4_experts_equal_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq_act_order", "packed_act_order"])
def test_experts_with_act_order_are_refused(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts: .*act-order"):
        load(tmp_path)


def test_groups_of_experts_in_another_order_than_the_config_says_are_named(tmp_path: Path) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"])
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.2.down_proj.g_idx"
    tensors = load_file(path)
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=rf"{name}: .*act-order"):
        load(tmp_path)


def test_experts_without_groups_in_the_checkpoint_load(tmp_path: Path) -> None:
    """Newer tools leave out `g_idx` without act-order."""
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"])
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.endswith("g_idx")}, path)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)


def test_biases_of_experts_must_be_0(tmp_path: Path) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"])
    names = add_biases(tmp_path)
    torch.testing.assert_close(logits(tmp_path), logits(tmp_path / "plain"), atol=2e-4, rtol=0)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.bias"
    tensors = load_file(path)
    assert name in names
    tensors[name][-1] = 0.5
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"unexpected {name}: .*0\\.5"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_a_missing_tensor_of_an_int4_expert_is_named(part: str, tmp_path: Path) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq_zeros"])
    path, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.experts.3.up_proj.{part}"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"missing {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("int8", "int8"), ("gptq_bytes", "8 bits (gptq)"), ("fp8_groups", f"fp8 in groups of {GROUP} ")],
)
def test_other_quantizations_of_experts_are_refused(name: str, scheme: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"moe_intermediate_size": 64})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    words = (str(tmp_path), "model.layers.0.mlp.experts", scheme, "16 bits, 4 bits, and fp8 with scales of")
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("name", "rule", "texts"),
    [
        ("gptq", {"group_size": 64}, ("4 bits (gptq) with group 64,", f"4 bits (gptq) with group {GROUP};")),
        ("gptq", {"desc_act": True}, ("4 bits (gptq) with ordered True,", "4 bits (gptq) with ordered False;")),
        ("gptq", {"group_size": 64, "sym": False}, ("with group 64, symmetric False,", "symmetric True;")),
    ],
)
def test_formats_of_experts_that_share_a_name_are_told_apart(
    name: str, rule: dict[str, Any], texts: tuple[str, str], tmp_path: Path
) -> None:
    save_random(tmp_path, GROUPS_OF_32)
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    set_quantization(tmp_path, LAYOUTS[name].config | {"dynamic": {r"+:.*experts\.2\.down_proj": rule}})
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert all(text in str(refused.value) for text in ("down_proj of expert 2", *texts))


def test_an_expert_in_another_format_than_the_others_is_named(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    layout = LAYOUTS["fp8_channel"]
    odd = "model.layers.1.mlp.experts.3.up_proj"
    quantize_layers(tmp_path, lambda name: layout if "_proj" in name and name != odd else None, layout.config)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    words = (str(tmp_path), "model.layers.1.mlp.experts", "up_proj of expert 3", "16 bits", "fp8")
    assert all(word in str(refused.value) for word in words)


def online(directory: Path) -> Any:
    """Load a 16-bit checkpoint as `--quantize fp8` does."""
    config = read_config(directory)
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.float32, Quantization(ONLINE_FP8)))
    load_weights(model, open_checkpoint(directory, config))
    return model


def test_both_layouts_are_quantized_alike_while_loading(tmp_path: Path) -> None:
    save_random(tmp_path, {"num_hidden_layers": 1})
    gate = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.experts.4.up_proj.weight"]
    first = online(tmp_path).layers[0].mlp.experts
    fuse_experts(tmp_path, 0)
    second = online(tmp_path).layers[0].mlp.experts
    for part in ("gate_up", "down", "gate_up_scales", "down_scales"):
        assert torch.equal(getattr(first, part).float(), getattr(second, part).float()), part
    found = first.parts[9].float() * first.gate_up_scales[9][:, None]
    torch.testing.assert_close(found, gate, atol=0.02, rtol=0.07)


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    quantize_checkpoint(tmp_path, LAYOUTS["fp8_channel"])
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    tensors = load_file(path)
    tensors[name][0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=rf"{name}: .*\bscales\b.*\bNaN\b"):
        load(tmp_path)


class Layer:
    """One network with random weights, and the norm before it."""

    def __init__(self, directory: Path, routing: Routing = Routing.TOP_K_SOFTMAX) -> None:
        save_random(directory, {"num_hidden_layers": 1})
        config = read_config(directory)
        assert config.moe is not None
        context = torch_build_context(torch.device("cpu"), torch.float32)
        model = build_model(config, context)
        fill_with_noise(model, 0.1)
        self.mlp: MixtureOfExperts = model.layers[0].mlp  # type: ignore[attr-defined]
        self.norm: RMSNorm = model.layers[0].mlp_norm  # type: ignore[attr-defined]
        self.switch: RoutingSwitch | None = model.routing
        self.moe: MoEConfig = config.moe


def test_padding_gets_zeros_and_does_not_change_other_rows(tmp_path: Path) -> None:
    layer = Layer(tmp_path)
    update, residual = torch.randn(9, 64), torch.randn(9, 64)
    rows = torch.tensor([1, 2, 0, 0, 3, 4, 0, 5, 6], dtype=torch.int32)
    alone, stream = layer.mlp(update, residual, layer.norm)
    found, _ = layer.mlp(update, residual, layer.norm, rows)
    assert torch.equal(found[rows != 0], alone[rows != 0]) and found[rows == 0].eq(0).all()
    torch.testing.assert_close(stream, update + residual)


def test_uniform_routing_ends_with_its_context(tmp_path: Path) -> None:
    layer = Layer(tmp_path)
    update, residual = torch.randn(40, 64), torch.randn(40, 64)
    padding = torch.zeros(40, dtype=torch.int32)
    before, _ = layer.mlp(update, residual, layer.norm)
    assert layer.switch is not None
    with layer.switch.uniform():
        uniform, _ = layer.mlp(update, residual, layer.norm, padding)
    assert not torch.equal(uniform, before) and uniform.abs().amax(1).gt(0).all()
    after, _ = layer.mlp(update, residual, layer.norm)
    assert torch.equal(after, before)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_row_does_not_depend_on_its_batch(tokens: int, tmp_path: Path) -> None:
    layer = Layer(tmp_path)
    update, residual = torch.randn(20, 64), torch.randn(20, 64)
    whole, _ = layer.mlp(update, residual, layer.norm)
    part, _ = layer.mlp(update[:tokens], residual[:tokens], layer.norm)
    torch.testing.assert_close(part, whole[:tokens], atol=1e-6, rtol=1e-6)
    order = torch.randperm(20)
    mixed, _ = layer.mlp(update[order], residual[order], layer.norm)
    torch.testing.assert_close(mixed, whole[order], atol=1e-6, rtol=1e-6)


def test_bfloat16_experts_with_forced_routing_stay_near_float32(tmp_path: Path) -> None:
    """Outputs are compared with float32's routing, which may flip only where logits are closer than the error."""
    layer = Layer(tmp_path)
    x = torch.randn(64, 64)
    router, top_k = layer.mlp.router, layer.moe.top_k
    exact, rounded = moe.router_logits(x, router), moe.router_logits(x.bfloat16(), router.bfloat16())
    routed = moe.route(exact, top_k, Routing.TOP_K_SOFTMAX)
    experts: Any = layer.mlp.experts
    expected = experts.run(x, routed)
    given = x.bfloat16(), experts.gate_up.bfloat16(), experts.down.bfloat16(), routed, experts.activation
    found = moe.run_experts(*given).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01
    error = (exact - rounded).abs().amax(1)
    ordered = exact.sort(1, descending=True).values
    margin = ordered[:, top_k - 1] - ordered[:, top_k]
    flipped = (moe.route(rounded, top_k, Routing.TOP_K_SOFTMAX).ids.sort(1).values != routed.ids.sort(1).values).any(1)
    assert (margin[flipped] < 2 * error[flipped]).all()
