"""Which architectures are served, how the others are refused, and the text halves of multimodal checkpoints."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.models.registry import FAMILIES, FAMILY_TABLE, build_model, read_config
from tests.support.paged_model import load
from tests.support.parity import SMALL, check_parity, save_random

OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV3ForCausalLM", {"n_routed_experts": 256}, ""),
    (
        "GptOssForCausalLM",
        {"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}},
        "MXFP4",
    ),
    ("Llama4ForConditionalGeneration", {"vision_config": {"a": 1}}, "multimodal"),
    ("LlavaForConditionalGeneration", {"vision_config": {"a": 1}}, "multimodal"),
    ("Qwen2VLForConditionalGeneration", {}, "multimodal"),
    ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"depth": 32}}, "multimodal"),
    ("MllamaForConditionalGeneration", {"vision_config": {"a": 1}}, "multimodal"),
    ("Phi3VForCausalLM", {}, "multimodal"),
    ("InternVLChatModel", {"vision_config": {"a": 1}}, "multimodal"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "encoder and decoder"),
    ("BertModel", {}, "embedding model"),
    ("XLMRobertaForSequenceClassification", {}, "reward model"),
    ("Qwen2ForSequenceClassification", {}, "reward model"),
    ("InternLM2ForRewardModel", {}, "reward model"),
    ("Qwen2Model", {}, "embedding model"),
    ("GPT2LMHeadModel", {}, ""),
    ("MambaForCausalLM", {}, ""),
]
PREFIXES = [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
"""Name prefixes of text tensors: in published folders, and as transformers writes them."""
TOWER, PROJECTOR = "vision_tower.transformer.layers.0.norm.weight", "multi_modal_projector.linear_1.weight"


def write_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


HUGE: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 10**30}, {"hidden_size": 10**15}, {"intermediate_size": 2**62},
    {"vocab_size": 2**40}, {"max_position_embeddings": 2**62}, {"max_position_embeddings": 10**30},
    {"original_max_position_embeddings": 2**62}, {"num_attention_heads": 2**62}, {"num_key_value_heads": 10**400},
    {"num_attention_heads": 2**20, "num_key_value_heads": 2**20, "head_dim": 2**20}, {"head_dim": 10**400},
    {"rope_theta": 1e300}, {"rms_norm_eps": 1e300}, {"rms_norm_eps": 5e-324},
    {"rope_scaling": {"rope_type": "yarn", "factor": 1e15}}, {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 5e-324}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 1e12}},
]  # fmt: skip
"""Changes of a configuration that no model has, and with which its numbers overflow."""


@pytest.mark.parametrize("changes", HUGE, ids=lambda changes: json.dumps(changes)[:70])
def test_numbers_beyond_those_of_any_model_are_refused_with_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    usual = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    }  # fmt: skip
    write_config(tmp_path, **usual)
    assert read_config(tmp_path).layers == 2
    write_config(tmp_path, **(usual | changes))
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "quantize_config.json"])
def test_a_file_that_is_nested_too_deeply_is_named(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["LlamaForCausalLM"])
    (tmp_path / name).write_text('{"x": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ConfigError, match="nested") as refused:
        read_config(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / name))


def test_a_deep_model_with_many_positions_is_checked_without_its_tables(tmp_path: Path) -> None:
    """The largest numbers that are read, with tensors that hold nothing."""
    write_config(
        tmp_path, architectures=["LlamaForCausalLM"], vocab_size=2**24, hidden_size=2**20, intermediate_size=2**24,
        num_hidden_layers=64, num_attention_heads=2**17, max_position_embeddings=2**24, head_dim=128,
    )  # fmt: skip
    config = read_config(tmp_path)
    built = build_model(config, torch_build_context(torch.device("meta"), torch.bfloat16, None))
    assert len(built.weight_slots()) > 9 * 64


@pytest.mark.parametrize(("architecture", "fields", "nature"), OTHERS)
def test_an_unknown_architecture_is_refused_for_what_it_is_before_any_other_field(
    architecture: str, fields: dict[str, Any], nature: str, tmp_path: Path
) -> None:
    write_config(tmp_path, architectures=[architecture], hidden_size="unreadable", **fields)
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path)
    text = str(refused.value)
    reason = text.partition(f" {architecture} ")[2].partition(";")[0]
    assert nature in reason and (":" in reason) == bool(nature)
    assert all(family.models in text for family in FAMILIES.values())
    assert FAMILY_TABLE in text
    assert "hidden_size" not in text


def test_table_of_families_has_the_names_of_the_models() -> None:
    table = (Path(__file__).parents[3] / FAMILY_TABLE).read_text()
    for architecture, family in FAMILIES.items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{architecture}` |")]
        assert family.models.split(" and ")[0] in row


@pytest.mark.parametrize("found", [None, [], ["A", "B"], [7], "LlamaForCausalLM"])
def test_a_config_names_one_architecture(found: Any, tmp_path: Path) -> None:
    write_config(tmp_path, architectures=found)
    with pytest.raises(ConfigError, match=rf"architectures .*{re.escape(str(found))}$"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("stated", "generation", "ends"),
    [
        ({}, None, (2,)),
        ({}, {}, (2,)),
        ({}, {"eos_token_id": [5, 2]}, (5, 2)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": 5}, (5, 7)),
        ({"eos_token_id": None}, None, ()),
        ({"vocab_size": 2}, None, ()),
    ],
)
def test_the_end_id_of_the_family_is_the_default(
    stated: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    fields = {name: value for name, value in SMALL.items() if name != "eos_token_id"}
    fields |= {"architectures": ["LlamaForCausalLM"]} | stated
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_ids == ends


def nest(folder: Path, prefixes: tuple[str, str]) -> None:
    """Turn a Mistral folder into a multimodal one with it as text backbone."""
    tensors = load_file(folder / "model.safetensors")
    nested = {
        prefixes[1] + name.removeprefix("lm_head.")
        if name.startswith("lm_head.")
        else prefixes[0] + name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }
    own = "model." if prefixes[1] == "lm_head." else ""
    vision = {own + TOWER: torch.ones(3), own + PROJECTOR: torch.ones(2, 3)}
    save_file(nested | vision, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = {"eos_token_id": text.pop("eos_token_id"), "dtype": text.pop("dtype")}
    write_config(
        folder,
        architectures=["Mistral3ForConditionalGeneration"],
        model_type="mistral3",
        text_config=text,
        vision_config={"hidden_size": 3},
        **outer,
    )


@pytest.fixture
def mistral(tmp_path: Path) -> Any:
    from transformers import MistralConfig

    return save_random(tmp_path, MistralConfig(**SMALL, sliding_window=None))


@pytest.mark.parametrize("prefixes", PREFIXES)
def test_the_text_backbone_of_a_multimodal_checkpoint_is_served_and_logged(
    prefixes: tuple[str, str], tmp_path: Path, mistral: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nest(tmp_path, prefixes)
    config = read_config(tmp_path)
    assert (config.architecture, config.multimodal) == ("Mistral3ForConditionalGeneration", True)
    assert (config.eos_ids, config.dtype) == ((2,), "float32")
    with caplog.at_level(logging.INFO):
        check_parity(tmp_path, mistral, schedules=[(7, 4)])
    (record,) = [record for record in caplog.records if "multimodal" in record.msg]
    assert record.args == ("Mistral3ForConditionalGeneration", 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_multimodal_checkpoint_of_transformers_has_the_logits_of_its_text(tied: bool, tmp_path: Path) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**SMALL, sliding_window=None, tie_word_embeddings=not tied)
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    reference = save_random(tmp_path, config, model_class=Mistral3ForConditionalGeneration)
    assert ("language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    check_parity(tmp_path, reference, schedules=[(7, 4)])


@pytest.mark.usefixtures("mistral")
def test_other_tensors_of_a_multimodal_checkpoint_remain_errors(tmp_path: Path) -> None:
    nest(tmp_path, PREFIXES[0])
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"language_model.model.extra.weight": torch.ones(2)}, path)
    with pytest.raises(ConfigError, match=r"unexpected language_model\.model\.extra\.weight"):
        load(tmp_path)


@pytest.mark.usefixtures("mistral")
def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    nest(tmp_path, PREFIXES[0])
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.language_model.norm.weight": torch.ones(64)}, path)
    with pytest.raises(ConfigError, match=r"\b(\S+\.)norm\.weight .*\band (?!\1)\S+\.norm\.weight\b"):
        load(tmp_path)


@pytest.mark.usefixtures("mistral")
def test_vision_tensors_of_a_text_model_remain_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {TOWER: torch.ones(3)}, path)
    with pytest.raises(ConfigError, match=r"unexpected vision_tower"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"model_type": "pixtral"}, 'text_config .*"pixtral".* "mistral" or "ministral3"'),
        (None, 'text_config .*"None"'),
        ({"model_type": "mistral", "hidden_size": 0}, "hidden_size"),
    ],
)
def test_a_text_half_that_is_not_supported_is_named(text: Any, words: str, tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["Mistral3ForConditionalGeneration"], text_config=text)
    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "fields", [{"scoring_func": "sigmoid"}, {"n_group": 4}, {"routed_scaling_factor": 2.5}, {"swiglu_limit": 7.0}]
)
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "qwen3.6-35b-a3b"])
def test_routing_of_other_families_is_refused_by_name(shape: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads(Path("benchmarks/shapes", shape, "config.json").read_text())
    config.get("text_config", config).update(fields)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=next(iter(fields))):
        read_config(tmp_path)
