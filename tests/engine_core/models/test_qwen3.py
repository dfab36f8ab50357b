"""Qwen 3: logits equal those of transformers, and norms of queries and keys must match the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine_core.errors import ConfigError
from tests.engine_core.loader.test_weights import ATTENTION, fuse, rewrite
from tests.engine_core.models.test_llama import BASE, LENGTHS, PREFILL, random_tokens, reference_logits, worst
from tests.support.paged_model import PagedRun, chunked, load

TOLERANCE = 1e-4
"""Measured: at most 7.8e-6 over these models, with logits up to 5.4."""

QWEN3 = {**BASE, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "wide_heads_tied": {"hidden_size": 48, "head_dim": 32, "num_attention_heads": 6, "tie_word_embeddings": True},
    "single_kv_head_large_eps": {"num_key_value_heads": 1, "rms_norm_eps": 0.05},
    "one_head_each_with_biases": {"num_key_value_heads": 4, "attention_bias": True},
    "published_head_dim": {"head_dim": 128, "num_hidden_layers": 2},
}


def save_random(directory: Path, fields: dict[str, Any], seed: int = 0) -> Any:
    """Save a random checkpoint, with random norms and biases, and return transformers' model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**{**QWEN3, **fields}, bos_token_id=1, eos_token_id=2, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, MODELS[name], seed=len(name))
    tokens = random_tokens(LENGTHS, BASE["vocab_size"], seed=1)
    expected = reference_logits(reference, tokens)
    model = load(tmp_path)
    errors = {}
    for chunk, page_size in ((1, 16), (7, 4), (1000, 16)):
        run = PagedRun(model, tokens, page_size, seed=chunk)
        errors[chunk] = worst(run.run(chunked(LENGTHS, PREFILL, chunk)), expected)
    print(name, "max abs error by chunk:", errors, "largest logit:", max(x.abs().max().item() for x in expected))
    assert max(errors.values()) < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
def test_fused_projections_load_to_the_same_model(tied: bool, tmp_path: Path) -> None:
    reference = save_random(tmp_path, {"tie_word_embeddings": tied})
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    tensors = fuse(load_file(tmp_path / "model.safetensors"))
    assert f"{ATTENTION}.qkv_proj.weight" in tensors
    assert f"{ATTENTION}.q_norm.weight" in tensors
    rewrite(tmp_path, tensors)
    found = PagedRun(load(tmp_path), tokens, 4, seed=1).step([(0, 0, 19)])
    assert worst([found], reference_logits(reference, tokens)) < TOLERANCE


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{ATTENTION}.k_norm.weight"]
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=rf"missing {ATTENTION}\.k_norm\.weight: expected \[16\]"):
        load(tmp_path)


def test_a_llama_refuses_norms_of_queries_and_keys(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=rf"unexpected {ATTENTION}\.q_norm\.weight: \[16\]"):
        load(tmp_path)
