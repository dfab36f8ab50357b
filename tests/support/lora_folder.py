"""Adapters in PEFT's format with random weights, and checkpoints with their updates merged."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def modules_of(model: Path, targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the modules of a checkpoint whose names end in one of these."""
    ends = tuple(f".{target}.weight" for target in targets)
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.endswith(ends)
    }


def write_adapter(
    folder: Path,
    model: Path,
    targets: Iterable[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.4,
    modules: dict[str, tuple[int, int]] | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter of a checkpoint; return its folder.

    modules: outputs and inputs of the modules that it changes, in place of those of the checkpoint; size: of the
    numbers; fields: of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets, generator = list(targets), torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
    } | fields
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in sorted((modules or modules_of(model, targets)).items()):
        own = rank_of(config, name)
        a, b = (torch.randn(shape, generator=generator) for shape in ((own, inputs), (outputs, own)))
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a * size / math.sqrt(inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b * size
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def rank_of(config: dict[str, Any], module: str) -> int:
    """Return the rank of a module, as PEFT finds it."""
    return int(_of_pattern(config.get("rank_pattern") or {}, module, config["r"]))


def _of_pattern(pattern: dict[str, Any], module: str, usual: Any) -> Any:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def updates_of(adapter: Path) -> dict[str, Tensor]:
    """Return the update of each module of an adapter, scaled, [outputs, inputs] float32."""
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    found = {}
    for name in [name for name in tensors if ".lora_A." in name]:
        module = name.removeprefix(PREFIX).partition(".lora_A.")[0]
        rank = rank_of(config, module)
        alpha = _of_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found[module] = scale * tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float()
    return found


def merge(model: Path, adapter: Path, to: Path) -> Path:
    """Write a checkpoint with the updates of an adapter added to its weights; return its folder."""
    to.mkdir()
    for path in model.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for module, update in updates_of(adapter).items():
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (weight.float() + update).to(weight.dtype)
    save_file(tensors, to / "model.safetensors")
    return to
