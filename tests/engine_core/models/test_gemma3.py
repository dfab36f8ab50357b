"""Gemma 3: logits equal those of transformers, alone and as the text backbone of a multimodal checkpoint."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.weights import load_weights
from tandem.engine_core.models.registry import build_model, open_checkpoint, read_config
from tandem.engine_core.rope_config import LinearScaling, RopeConfig
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import SCHEDULES, SMALL, check_parity, random_tokens, save_random

LOCAL_TWICE = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
GEMMA3 = SMALL | LOCAL_TWICE | {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
NORMS = (-0.5, 0.5)
"""Range of the stored weights, to which 1 is added."""
MODELS: dict[str, dict[str, Any]] = {
    "window_of_half_a_page": {},
    "window_across_pages": {"sliding_window": 21, "num_key_value_heads": 4},
    "window_beyond_the_sequences": {"sliding_window": 512, "num_key_value_heads": 1},
    "unscaled_global_layers": {"rope_parameters": None},
    "untied_with_biases_and_a_cap": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
    },
    "scale_unlike_the_head_size": {"query_pre_attn_scalar": 40, "head_dim": 32, "hidden_size": 48},
    "published_pattern": {"layer_types": None, "num_hidden_layers": 7},
    "published_head_size": {
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 256,
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 256,
    },
}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def save(directory: Path, name: str) -> Any:
    from transformers import Gemma3TextConfig

    return save_random(directory, Gemma3TextConfig(**GEMMA3 | MODELS[name]), seed=len(name), norms=NORMS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    schedules = SCHEDULES if name == "window_of_half_a_page" else SCHEDULES[1:]
    check_parity(tmp_path, save(tmp_path, name), schedules=schedules)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.3), (torch.float16, 0.04)], ids=str)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    reference = save(tmp_path, "window_across_pages")
    check_parity(tmp_path, reference, dtype=dtype, tolerance=tolerance, schedules=((7, 4),))


def test_the_older_layout_of_rotary_fields_gives_the_same_model(tmp_path: Path) -> None:
    save(tmp_path, "published_pattern")
    new = read_config(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types"):
        del fields[name]
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    path.write_text(json.dumps(fields | older | {"sliding_window_pattern": 6}))
    assert read_config(tmp_path) == new
    path.write_text(json.dumps(fields | {"rope_scaling": older["rope_scaling"]}))
    assert read_config(tmp_path) == new, "the bases and the pattern are those of transformers' defaults"


PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""The fields of gemma-3-4b-it that matter; it leaves out what transformers has as a default."""


def test_a_published_config_with_a_nested_text_half_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_4B))
    config = read_config(tmp_path)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_positions, config.eos_ids, config.dtype) == (131072, (1, 106), "bfloat16")
    assert config.ropes == (RopeConfig(256, 1e6, LinearScaling(8.0)), RopeConfig(256, 1e4))
    assert [index for index, layer in enumerate(config.attention) if layer.window is None] == [5, 11, 17, 23, 29]
    assert {(layer.scale, layer.window, layer.softcap, layer.rotary) for layer in config.attention} == {
        (1 / 16, 1024, None, 1),
        (1 / 16, None, None, 0),
    }
    assert config.tie_embeddings and config.qk_norm and config.multimodal


def save_multimodal(directory: Path) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=GEMMA3, vision_config=VISION, mm_tokens_per_image=4, image_token_index=156,
        boi_token_index=154, eoi_token_index=155, eos_token_id=[1, 5],
    )  # fmt: skip
    return save_random(directory, config, norms=NORMS, model_class=Gemma3ForConditionalGeneration)


@pytest.mark.parametrize("published", [False, True])
def test_the_text_half_of_a_multimodal_checkpoint_equals_transformers(published: bool, tmp_path: Path) -> None:
    reference = save_multimodal(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert any("vision_tower" in name for name in tensors)
    text = {name.split("language_model.")[-1].removeprefix("model."): name for name in tensors if "language" in name}
    assert "layers.0.pre_feedforward_layernorm.weight" in text
    prefix = "language_model.model." if published else "model.language_model."
    for own, name in text.items():
        tensors[prefix + own] = tensors.pop(name)
    save_file(tensors, path)
    check_parity(tmp_path, reference, schedules=((7, 4),))


def test_bidirectional_attention_and_capped_scores_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "window_of_half_a_page")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    changes = {"use_bidirectional_attention": True, "attn_logit_softcapping": 50.0}
    path.write_text(json.dumps(fields | changes))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    for name in changes:
        assert name in str(caught.value)


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    save(tmp_path, "window_of_half_a_page")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.3.post_feedforward_layernorm.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"missing model\.layers\.3\.post_feedforward_layernorm\.weight: expected"):
        load(tmp_path)


class CountedKernels:
    """A set of kernels that counts its calls."""

    def __init__(self, kernels: KernelSet) -> None:
        self.calls: Counter[str] = Counter()
        self.kernels = KernelSet(*(self._counted(name, getattr(kernels, name)) for name in KernelSet.__slots__))

    def _counted(self, name: str, kernel: Any) -> Any:
        def run(*given: Any) -> Any:
            self.calls[name] += 1
            return kernel(*given)

        return run


def test_a_layer_has_no_more_operations_than_one_without_post_norms(tmp_path: Path) -> None:
    save(tmp_path, "window_of_half_a_page")
    config = read_config(tmp_path)
    context = torch_build_context(torch.device("cpu"), torch.float32)
    counted = CountedKernels(context.kernels)
    checkpoint = open_checkpoint(tmp_path, config)
    model = build_model(config, replace(context, kernels=counted.kernels), checkpoint=checkpoint)
    load_weights(model, checkpoint)
    PagedRun(model, random_tokens((5,), 157, seed=1), 4, seed=0).run(chunked((5,), (5,), 5))
    layers = config.layers
    assert counted.calls == {
        "rms_norm": 1,
        "norm_add_rms_norm": 2 * layers,
        "rope_and_kv_write": layers,
        "gated_activation": layers,
    }
