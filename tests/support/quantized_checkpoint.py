"""Tiny quantized checkpoints, written number by number as the tools lay them out, and what they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


@dataclass(frozen=True)
class Layout:
    """A tool's layout."""

    config: dict[str, Any]
    """The `quantization_config`."""
    write: Callable[[Tensor, int | None], tuple[Tensors, Tensor]]
    """Function from a weight, [outputs, inputs], and a seed of zero points (None: those that fit the weight) to its
    tensors by the last part of their names, and to the weight that they stand for."""


def quantize_checkpoint(directory: Path, layout: Layout, fitted: bool = False) -> None:
    """Quantize the projections of a float checkpoint in place, and store the same numbers in float32 in `plain`.

    fitted: zero points fit the weights, instead of being any.
    """
    quantize_layers(directory, lambda module: layout if module.endswith("_proj") else None, layout.config, fitted)


def quantize_layers(
    directory: Path, layout_of: Callable[[str], Layout | None], config: dict[str, Any], fitted: bool = False
) -> None:
    """Quantize some layers of a float checkpoint in place, and store the same numbers in float32 in `plain`.

    layout_of: returns the layout of a module, None for one that is not quantized; config: the `quantization_config`.
    """
    quantized: Tensors = {}
    plain: Tensors = {}
    for index, (name, tensor) in enumerate(load_file(directory / "model.safetensors").items()):
        layout = layout_of(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layout is None:
            quantized[name] = plain[name] = tensor
            continue
        tensors, plain[name] = layout.write(tensor, None if fitted else index)
        stem = name.removesuffix("weight")
        quantized |= {stem + last: value.contiguous() for last, value in tensors.items()}
    (directory / "plain").mkdir()
    for path in directory.glob("*.json"):
        (directory / "plain" / path.name).write_bytes(path.read_bytes())
    save_file({name: value.contiguous() for name, value in plain.items()}, directory / "plain" / "model.safetensors")
    save_file(quantized, directory / "model.safetensors")
    set_quantization(directory, config)


def add_biases(directory: Path, value: float = 0.0) -> list[str]:
    """Add a bias to each layer with `qweight` that has none, as AutoGPTQ does; return their names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    layers = {name.removesuffix("scales"): tensor for name, tensor in tensors.items() if name.endswith(".scales")}
    biases = {f"{layer}bias": torch.full(scales.shape[-1:], value) for layer, scales in layers.items()}
    added = {name: bias for name, bias in biases.items() if name not in tensors}
    save_file(tensors | added, path)
    return list(added)


def set_quantization(directory: Path, config: dict[str, Any] | None) -> None:
    """Write a `quantization_config` into config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def fp8_tensor(weight: Tensor, seed: int | None) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    shape = () if seed and seed % 2 else (1,)
    tensors = {"weight": values, "weight_scale": scale.reshape(shape), "input_scale": torch.full(shape, 0.01)}
    return tensors, values.float() * scale


def fp8_transformers(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
    """Write a weight as transformers' `FP8Linear` without blocks and with static inputs."""
    scale = (weight.abs().max() / 448).bfloat16()
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.01).bfloat16()}
    return tensors, values.float() * scale.float()


def fp8_channel(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_block(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
    outputs, inputs = weight.shape
    scale = torch.empty(-(-outputs // 128), -(-inputs // 128))
    values, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = (weight[block].abs().max() / 448).bfloat16()
            values[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            plain[block] = values[block].float() * scale[i, j]
    return {"weight": values, "weight_scale_inv": scale.bfloat16()}, plain


def int8_channel(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def levels(
    weight: Tensor, seed: int | None, symmetric: bool, group_of: NDArray[np.int64]
) -> tuple[Any, Any, Any, Tensor]:
    """Quantize to four bits; return levels [N, K], scales and zero points [N, G], and the weight they stand for."""
    values = weight.double().numpy()
    groups = int(group_of.max()) + 1
    zeros = np.full((len(values), groups), 8)
    if not symmetric and seed is not None:
        zeros = np.random.default_rng(seed).integers(0, 16, zeros.shape)
    scales = np.empty(zeros.shape, np.float16)
    found, plain = np.empty(values.shape, np.int64), np.empty(values.shape)
    for group in range(groups):
        inside = group_of == group
        scales[:, group] = np.abs(values[:, inside]).max(1) / 8
        if not symmetric and seed is None:
            low, high = values[:, inside].min(1).clip(max=0), values[:, inside].max(1).clip(min=0)
            scales[:, group] = (high - low) / 15
            zeros[:, group] = np.round(-low / scales[:, group].astype(float))
        scale, zero = scales[:, group, None].astype(float), zeros[:, group, None]
        found[:, inside] = np.clip(np.round(values[:, inside] / scale) + zero, 0, 15)
        plain[:, inside] = (found[:, inside] - zero) * scale
    return found, scales, zeros, torch.from_numpy(plain).float()


def packed(numbers: NDArray[np.int64], order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack the last dimension, eight numbers a word, number order[i] in nibble i."""
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for word in range(words.shape[-1]):
        for nibble in range(8):
            words[..., word] |= (numbers[..., 8 * word + order[nibble]].astype(np.uint32)) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(symmetric: bool, act_order: bool, version: int = 1, group: int = GROUP) -> Layout:
    def write(weight: Tensor, seed: int | None) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        group_of = np.arange(inputs) // size
        if act_order:
            # The same for the projections of one input, as they see the same activations.
            group_of = np.random.default_rng(inputs).permutation(group_of)
        found, scales, zeros, plain = levels(weight, seed, symmetric, group_of)
        stored = (zeros - 1) % 16 if version == 1 else zeros
        return {
            "qweight": packed(found).t(),
            "qzeros": packed(stored.T.copy()),
            "scales": torch.from_numpy(scales).t(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, plain

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": symmetric}
    return Layout(config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write)


def awq() -> Layout:
    def write(weight: Tensor, seed: int | None) -> tuple[Tensors, Tensor]:
        found, scales, zeros, plain = levels(weight, seed, False, np.arange(weight.shape[1]) // GROUP)
        return {
            "qweight": packed(found.T.copy(), AWQ_ORDER),
            "qzeros": packed(zeros.T.copy(), AWQ_ORDER),
            "scales": torch.from_numpy(scales).t(),
        }, plain

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"}
    return Layout(config | {"modules_to_not_convert": None}, write)


def packed_tensors(symmetric: bool, act_order: bool = False) -> Layout:
    def write(weight: Tensor, seed: int | None) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        group_of = np.arange(inputs) // GROUP
        if act_order:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        found, scales, zeros, plain = levels(weight, seed, symmetric, group_of)
        tensors = {
            "weight_packed": packed(found),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        plain = torch.from_numpy(found - zeros[:, group_of]).float() * tensors["weight_scale"].float()[:, group_of]
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T.copy()).t()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, plain

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return compressed("pack-quantized", weights | {"actorder": "group" if act_order else None}, None, write)


def compressed(
    kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None, write: Callable[[Tensor, int | None], Any]
) -> Layout:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return Layout(config | {"ignore": ["lm_head"], "quantization_status": "compressed"}, write)


def bytes_of(weight: Tensor, group_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor, Tensor]:
    """Quantize to eight bits; return numbers from 0 to 255 [N, K], scales [N, G], and the weight they stand for."""
    values, groups = weight.double().numpy(), int(group_of.max()) + 1
    scales = np.empty((len(values), groups), np.float16)
    for group in range(groups):
        scales[:, group] = np.abs(values[:, group_of == group]).max(1) / 127
    spread = scales.astype(float)[:, group_of]
    found = np.clip(np.round(values / spread), -128, 127).astype(np.int64)
    return found + 128, torch.from_numpy(scales), torch.from_numpy(found * spread).float()


def packed_bytes(numbers: NDArray[np.int64]) -> Tensor:
    """Pack the last dimension, four numbers a word, the first in the lowest byte."""
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 4), np.uint32)
    for byte in range(4):
        words |= numbers[..., byte::4].astype(np.uint32) << np.uint32(8 * byte)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq_bytes(act_order: bool, version: int = 1, group: int = GROUP) -> Layout:
    def write(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        group_of = np.arange(inputs) // (inputs if group == -1 else group)
        if act_order:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        found, scales, plain = bytes_of(weight, group_of)
        zeros = np.full((scales.shape[1], len(found)), 127 if version == 1 else 128)
        return {
            "qweight": packed_bytes(found).t(),
            "qzeros": packed_bytes(zeros),
            "scales": scales.t(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, plain

    config = {"quant_method": "gptq", "bits": 8, "group_size": group, "desc_act": act_order, "sym": True}
    return Layout(config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write)


def weight_only(kind: str, name: str, group: int | None) -> Layout:
    """Return a layout of compressed-tensors with 8-bit weights and 16-bit activations."""

    def write(weight: Tensor, _seed: int | None) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        found, scales, plain = bytes_of(weight, np.arange(inputs) // (group or inputs))
        if name == "pack-quantized":
            packed_weight = {"weight_packed": packed_bytes(found), "weight_shape": torch.tensor(weight.shape)}
            return packed_weight | {"weight_scale": scales}, plain
        if kind == "int":
            return {"weight": torch.from_numpy(found - 128).to(torch.int8), "weight_scale": scales}, plain
        wide = scales.float().repeat_interleave(group or inputs, 1) * 127 / 448
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scales.float() * 127 / 448}, values.float() * wide

    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return compressed(name, {"num_bits": 8, "type": kind, "symmetric": True} | strategy, None, write)


_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
LAYOUTS = {
    "fp8_tensor_static": Layout({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8_tensor_dynamic": Layout({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor),
    "fp8_block": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        fp8_block,
    ),
    "fp8_channel": compressed("float-quantized", _CHANNEL | {"type": "float"}, _TOKEN | {"type": "float"}, fp8_channel),
    "fp8_compressed_static": compressed(
        "float-quantized", _CHANNEL | {"type": "float", "strategy": "tensor"}, _STATIC | {"type": "float"}, fp8_tensor
    ),
    "modelopt": Layout({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8_tensor),
    "modelopt_channel": Layout({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8_channel),
    "int8": compressed("int-quantized", _CHANNEL | {"type": "int"}, _TOKEN | {"type": "int"}, int8_channel),
    "gptq": gptq(True, False),
    "gptq_one_group": gptq(True, False, group=-1),
    "gptq_zeros": gptq(False, False),
    "gptq_act_order": gptq(True, True),
    "gptq_v2_act_order_zeros": gptq(False, True, version=2),
    "awq": awq(),
    "packed": packed_tensors(True),
    "packed_zeros": packed_tensors(False),
    "packed_act_order": packed_tensors(False, True),
    "gptq_bytes": gptq_bytes(False),
    "gptq_bytes_one_group": gptq_bytes(False, group=-1),
    "gptq_bytes_v2_act_order": gptq_bytes(True, version=2),
    "packed_bytes": weight_only("int", "pack-quantized", GROUP),
    "packed_bytes_channel": weight_only("int", "pack-quantized", None),
    "int8_groups": weight_only("int", "int-quantized", GROUP),
    "fp8_groups": weight_only("float", "float-quantized", GROUP),
}
