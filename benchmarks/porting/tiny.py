"""Save tiny random checkpoints of every family using transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Config fields of all families, with layers for two local and two global ones."""
TINY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Ministral3ForCausalLM": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 24},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "OlmoeForCausalLM": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 2.0},
    "Qwen3_5ForCausalLM": {
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "Qwen3_5MoeForCausalLM": {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
    },
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "Phi3ForCausalLM": {"model_type": "phi3", "partial_rotary_factor": 0.5},
}
"""Config fields by architecture; windows are shorter than the prompt of a check."""


def save_tiny(architecture: str, folder: Path, seed: int = 0, **fields: Any) -> None:
    """Save a checkpoint of an architecture in float32.

    Weights, norms and biases are random. fields: override those of config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(**(COMMON | TINY[architecture] | fields))
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize_vectors(model, norm_range(architecture))
        model.save_pretrained(folder)


def norm_range(architecture: str) -> tuple[float, float]:
    """Return the range of random norm weights of an architecture: about 1, or about 0 if it stores weight - 1."""
    return (-0.5, 0.5) if architecture.startswith(("Gemma", "Qwen3_5", "Qwen3Next")) else (0.5, 1.5)


def randomize_vectors(model: Any, norms: tuple[float, float]) -> None:
    """Randomize the norms and biases of a model.

    transformers initializes them to ones and zeros. norms: range of the norm weights.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(*norms)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
