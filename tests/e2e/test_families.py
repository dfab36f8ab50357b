"""Greedy tokens of every family over HTTP: they are those of transformers' `generate`."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tokenizer import byte_level_tokenizer, write_tokenizer
from tests.support.parity import SMALL, greedy_tokens, random_tokens, save_random
from tests.support.serving import GUARD_SECONDS, Serving

LENGTHS = (3, 30, 50)
TOKENS = 20
WINDOW = 8
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"rope_parameters": PARTIAL, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}
"""Configuration in transformers, with the fields that are not those of `SMALL`."""
NORMS: dict[str, tuple[float, float]] = dict.fromkeys(
    ("gemma2", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next"), (-0.5, 0.5)
)
"""Range of the norms' weights, of families that store another than their factor."""


def complete(url: str, prompt: list[int]) -> list[int]:
    """Return the ids of a greedy completion of `TOKENS` tokens."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as response:
        found: list[int] = json.load(response)["choices"][0]["token_ids"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_over_http_are_those_of_generate(name: str, tmp_path: Path) -> None:
    import transformers

    kind, fields = FAMILIES[name]
    folder = tmp_path / "model"
    vocab = byte_level_tokenizer().get_vocab_size()
    config = getattr(transformers, kind)(**SMALL | {"vocab_size": vocab} | fields)
    reference = save_random(folder, config, seed=5, norms=NORMS.get(name, (0.5, 1.5)))
    write_tokenizer(folder)
    prompts = [sequence.tolist() for sequence in random_tokens(LENGTHS, vocab, seed=6)]
    expected = [greedy_tokens(reference, prompt, TOKENS) for prompt in prompts]
    flags = ("--model", str(folder), "--served-model-name", "model", "--dtype", "float32", "--device", "cpu")
    with Serving(tmp_path / "log", *flags) as serving:
        assert [complete(serving.url, prompt) for prompt in prompts] == expected
