"""Ministral 3: logits equal those of transformers, within the original context and beyond, alone and multimodal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.rotary import query_scale_table
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.rope_config import QueryScaling, YarnScaling
from tests.support.parity import SCHEDULES, SMALL, check_parity, save_random
from tests.support.thinned import thinned

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "beyond_the_original_context": {"rope_parameters": YARN},
    "strongly_scaled_tied": {
        "rope_parameters": YARN | {"llama_4_scaling_beta": 2.5, "original_max_position_embeddings": 7},
        "tie_word_embeddings": True,
    },
    "original_context_at_the_top": {"rope_parameters": YARN, "original_max_position_embeddings": 7},
    "own_attention_factor": {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": None, "factor": 4.0}},
    "within_a_window": {"rope_parameters": YARN, "sliding_window": 13, "num_key_value_heads": 1},
    "without_yarn": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "original_max_position_embeddings": 5,
            "llama_4_scaling_beta": 0.5,
        }
    },
}


def config_of(name: str) -> Any:
    from transformers import Ministral3Config

    fields = MODELS[name]
    rope = {key: value for key, value in fields["rope_parameters"].items() if value is not None}
    return Ministral3Config(**SMALL | {"head_dim": 32} | fields | {"rope_parameters": rope})


@pytest.mark.parametrize(("name", "schedule"), thinned(list(MODELS), SCHEDULES), ids=str)
def test_logits_equal_transformers(name: str, schedule: tuple[int, int], tmp_path: Path) -> None:
    reference = save_random(tmp_path, config_of(name), seed=len(name))
    assert read_config(tmp_path).query_scaling is not None
    check_parity(tmp_path, reference, schedules=[schedule])


def test_the_text_backbone_of_a_mistral_3_is_chosen_by_its_type(tmp_path: Path) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=config_of("strongly_scaled_tied"), vision_config=vision)
    reference = save_random(tmp_path, config, model_class=Mistral3ForConditionalGeneration)
    found = read_config(tmp_path)
    assert (found.architecture, found.family) == ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM")
    check_parity(tmp_path, reference, schedules=[(7, 4)])


PUBLISHED = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "tie_word_embeddings": False,
    "quantization_config": {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    },
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": YARN
        | {"type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 16384, "max_position_embeddings": 1},
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_config(tmp_path)
    assert config.query_scaling == QueryScaling(0.1, 16384)
    assert config.ropes[0].theta == 1e6 and isinstance(config.ropes[0].scaling, YarnScaling)
    assert (config.max_positions, config.eos_ids, config.tie_embeddings) == (262144, (2,), False)
    assert config.quantization is not None
    assert config.quantization.scheme_for("model.layers.0.mlp.down_proj") is not None
    assert config.quantization.scheme_for("lm_head") is None
    defaults = {"model_type": "ministral3"}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"text_config": defaults}))
    assert structs.replace(read_config(tmp_path), quantization=None) == structs.replace(config, quantization=None)


@pytest.mark.parametrize("change", [{"llama_4_scaling_beta": "x"}, {"original_max_position_embeddings": 0}])
def test_a_malformed_scaling_of_queries_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    text = PUBLISHED["text_config"] | {"rope_parameters": YARN | change}  # type: ignore[operator]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"text_config": text}))
    with pytest.raises(ConfigError, match="llama_4_scaling_beta"):
        read_config(tmp_path)


def test_queries_of_the_original_context_are_not_scaled() -> None:
    scaling, cpu = QueryScaling(0.5, 8), torch.device("cpu")
    assert query_scale_table(scaling, 8, cpu, torch.float32) is None
    assert query_scale_table(None, 100, cpu, torch.float32) is None
    table = query_scale_table(scaling, 17, cpu, torch.float32)
    assert table is not None and table.shape == (17, 1, 1)
    assert table[:8].eq(1).all() and table[8:16].allclose(1 + 0.5 * torch.tensor(2.0).log())
