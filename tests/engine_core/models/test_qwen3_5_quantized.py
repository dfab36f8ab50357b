"""Quantized releases of Qwen 3.5, as published: wrapped, and with the gates of the state in 16 bits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_core.models.test_qwen3_5 import save_random
from tests.support.paged_model import PagedRun, load
from tests.support.parity import VOCAB, random_tokens
from tests.support.quantized_checkpoint import LAYOUTS, Layout, awq, gptq, packed_tensors, quantize_layers

WRAPPER = "model.language_model.layers.{}.linear_attn."
GATES = [WRAPPER.format(layer) + part for layer in range(3) for part in ("in_proj_a", "in_proj_b", "in_proj_ba")]
CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "fp8 blocks": (
        LAYOUTS["fp8_block"],
        r"in_proj_[ab]$",
        {"modules_to_not_convert": ["lm_head", "model.visual", *GATES, WRAPPER.format(0) + "conv1d", "mtp.fc"]},
    ),
    "fp8 channels": (
        LAYOUTS["fp8_channel"],
        r"in_proj_[ab]$",
        {"ignore": ["lm_head", r"re:.*linear_attn\.in_proj_[ab]$", "re:.*visual.*", "re:^mtp.*"]},
    ),
    "fp8 blocks without rules": (LAYOUTS["fp8_block"], r"in_proj_[ab]$", {}),
    "w4a16": (
        packed_tensors(True),
        r"in_proj_[ab]$",
        {"ignore": ["lm_head", *(name for name in GATES if not name.endswith("ba")), "re:.*visual.*"]},
    ),
    "w4a16 without recurrent layers": (
        packed_tensors(True),
        "linear_attn",
        {"ignore": ["lm_head", r"re:.*linear_attn.*", r"re:.*visual.*"]},
    ),
    "gptq": (gptq(True, False), r"in_proj_[ab]$", {"dynamic": {r"-:.*linear_attn\.in_proj_(a|b|ba)$": {}}}),
    "awq": (awq(), r"in_proj_[ab]$", {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "visual"]}),
    "modelopt": (
        LAYOUTS["modelopt"],
        r"in_proj_[ab]$",
        {"ignore": ["lm_head", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b*", "model.visual*", "mtp*"]},
    ),
}
"""Layout of quantized layers, expression of the layers that are not, and the config's rules."""


def write(directory: Path, layout: Layout, plain: str, config: dict[str, Any], seed: int = 0) -> None:
    fields = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    save_random(directory, fields | {"intermediate_size": 96}, seed=seed)

    def layout_of(module: str) -> Layout | None:
        is_linear = re.search(r"_proj(_\w+)?$", module) and not re.search(plain, module)
        return layout if is_linear else None

    quantize_layers(directory, layout_of, layout.config | config)
    for folder in (directory, directory / "plain"):
        wrap(folder)


def wrap(folder: Path) -> None:
    """Turn a text model's folder into one as published, with tensors of images and drafts."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    if "quantization_config" in text:
        outer["quantization_config"] = text.pop("quantization_config")
    path.write_text(json.dumps(outer | {"text_config": text}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 8), "mtp.fc.weight": torch.zeros(4, 8)}
    save_file(tensors, folder / "model.safetensors")


def logits(directory: Path) -> torch.Tensor:
    """Logits of a prompt, and of two tokens after it."""
    run = PagedRun(load(directory), random_tokens((40,), VOCAB, seed=1), 16, seed=1)
    return run.run([[(0, 0, 38)], [(0, 38, 1)], [(0, 39, 1)]])[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    layout, plain, config = CASES[name]
    write(tmp_path, layout, plain, config)
    found, expected = logits(tmp_path), logits(tmp_path / "plain")
    # Inputs of layers are rounded to eight bits, but for 4-bit weights.
    bound = 1e-3 if name.startswith(("w4a16", "gptq", "awq")) else 0.15
    assert float((found - expected).abs().mean()) < bound * float(expected.std())
    assert torch.isfinite(found).all()
