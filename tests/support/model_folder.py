"""Write a model directory with random weights in Hugging Face's layout."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.support.tiny_llama import CONFIG, random_model

FUSED = ("qkv_proj", "gate_up_proj")


def write_model(folder: Path) -> None:
    """Write the weights of `random_model`, its config.json, and a tokenizer.json that cannot be loaded."""
    slots = [slot for slot in random_model().weight_slots() if not any(fused in slot.name for fused in FUSED)]
    save_file({slot.name: slot.target.contiguous().clone() for slot in slots}, folder / "model.safetensors")
    write_config(folder)
    (folder / "tokenizer.json").write_bytes(b"{}")


def write_config(folder: Path, **changes: Any) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "max_position_embeddings": CONFIG.max_positions,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "eos_token_id": list(CONFIG.eos_ids),
    }
    (folder / "config.json").write_text(json.dumps(fields | changes))
