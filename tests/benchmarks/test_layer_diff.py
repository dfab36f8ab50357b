"""Comparison of two implementations layer by layer, on a tiny checkpoint and on one with a changed weight."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.layer_diff import compare, main, sides, table, token_ids
from benchmarks.porting.streams import Recorder, StructureError, tapped
from tests.support.parity import SMALL, save_random

SHORT = ["--device", "cpu", "--tokens", "24", "--decode", "3"]


@pytest.fixture(scope="module")
def changed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkpoint with another weight in the feed-forward network of layer 1."""
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_folder_agrees_with_transformers_at_every_point(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny), "transformers", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    points = [line[:22].strip() for line in lines[1:-1]]
    layers = [f"layer {index} {part}" for index in range(4) for part in ("attention", "mlp")]
    assert points == ["embedding", *layers, "final norm", "logits"]
    assert "agree" in lines[-1] and lines[-1].endswith(" 1e-04")


def test_the_text_half_of_a_multimodal_folder_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**SMALL, sliding_window=None, tie_word_embeddings=False)
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    save_random(tmp_path, config, model_class=Mistral3ForConditionalGeneration)
    assert main([str(tmp_path), "transformers", *SHORT]) == 0
    assert "points agree" in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["transformers:{}", "{}"])
def test_the_first_difference_is_named(
    tiny: Path, changed: Path, reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny), reference.format(changed), *SHORT]) == 1
    output = capsys.readouterr().out
    assert "difference: layer 1 mlp," in output
    marked = [line[:22].strip() for line in output.splitlines() if line.endswith("<--")]
    assert marked[0] == "layer 1 mlp" and marked[-1] == "logits"


def test_what_cannot_be_compared_is_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transformers", "transformers"]) == 2
    assert re.fullmatch(r"layer_diff: .*\btransformers:FOLDER\n", capsys.readouterr().err)
    assert main([str(tmp_path), str(tiny), *SHORT]) == 2
    assert capsys.readouterr().err.startswith("layer_diff: ")


def test_a_side_without_a_folder_takes_that_of_the_other() -> None:
    tandem, reference = ("tandem", Path("m")), ("transformers", Path("m"))
    assert sides("m", "transformers") == (tandem, reference)
    assert sides("transformers", "m") == (reference, tandem)
    assert sides("transformers:x", "m") == (("transformers", Path("x")), tandem)
    assert sides("m", "x") == (tandem, ("tandem", Path("x")))


def test_nan_is_a_difference() -> None:
    expected = torch.ones(3, 4)
    found = expected.clone()
    found[1, 2] = torch.nan
    [one] = compare({"logits": found}, {"logits": expected})
    assert one.token == 1
    assert re.search(r"difference: logits, .*\binf\b", table([one], 1.0))


def test_sides_with_other_points_or_shapes_are_refused() -> None:
    streams = {"embedding": torch.ones(3, 4)}
    with pytest.raises(StructureError, match="points: logits"):
        compare(streams, {**streams, "logits": torch.ones(3, 9)})
    with pytest.raises(StructureError, match=r"^embedding\b.*\[3, 4\] and \[3, 5\]"):
        compare(streams, {"embedding": torch.ones(3, 5)})


def test_a_model_of_another_structure_is_refused() -> None:
    with (
        pytest.raises(StructureError, match=r"^object\b.*`layers`.*models/README\.md"),
        tapped(object(), Recorder()),
    ):
        pass


def test_random_tokens_depend_on_the_seed_alone(tiny: Path) -> None:
    assert token_ids(tiny, None, 9, 1) == token_ids(tiny, None, 9, 1) != token_ids(tiny, None, 9, 2)
    assert token_ids(Path("engine_core/default_model"), "What does abs do?", 9, 1)[0] == 1


def test_random_tokens_of_a_text_half_that_leaves_out_its_vocabulary(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert 200_000 < max(token_ids(tmp_path, None, 100, 1)) < 262_208
