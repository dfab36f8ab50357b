"""Write a model directory with random weights in Hugging Face's layout."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tandem.engine_core.model_config import ModelConfig
from tests.support.tiny_llama import CONFIG, random_model

FUSED = ("qkv_proj", "gate_up_proj")


def write_model(folder: Path, config: ModelConfig = CONFIG) -> None:
    """Write the weights of `random_model`, its config.json, and a tokenizer.json that cannot be loaded."""
    slots = [
        slot
        for slot in random_model(config=config).weight_slots()
        if not slot.is_optional and not any(fused in slot.name for fused in FUSED)
    ]
    save_file({slot.name: slot.target.contiguous().clone() for slot in slots}, folder / "model.safetensors")
    write_config(folder, config)
    (folder / "tokenizer.json").write_bytes(b"{}")


def write_config(folder: Path, config: ModelConfig = CONFIG, **changes: Any) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "eos_token_id": list(config.eos_ids),
    }
    (folder / "config.json").write_text(json.dumps(fields | changes))
