"""What the process that stages a checkpoint refuses, and its death."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.startup.checkpoint_stager import ProcessStager
from tandem.engine_core.startup.stage_checkpoint import check_swap, read_through
from tests.support.model_folder import write_model

GUARD_SECONDS = 120.0


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return folders of the model that serves and of the same with other weights."""
    base, new = tmp_path / "base", tmp_path / "new"
    base.mkdir()
    write_model(base)
    shutil.copytree(base, new)
    change(new, lambda tensors: tensors["model.norm.weight"].mul_(2))
    return base, new


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_field(folder: Path, name: str, value: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {name: value}))


def test_other_weights_of_the_same_model_fit(pair: tuple[Path, Path]) -> None:
    base, new = pair
    check_swap(base, new)
    assert list(read_through(new))[-1] == 100


DIFFERENCES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "architecture": (
        lambda new: set_field(new, "architectures", ["MistralForCausalLM"]),
        ("LlamaForCausalLM", "MistralForCausalLM"),
    ),
    "epsilon": (lambda new: set_field(new, "rms_norm_eps", 0.5), ("rms_norm_eps", "0.5")),
    "end ids": (lambda new: set_field(new, "eos_token_id", [7]), ("eos_ids", "7")),
    "tokenizer": (lambda new: (new / "tokenizer.json").write_text("[]"), ("tokenizer.json",)),
    "missing tokenizer": (lambda new: (new / "tokenizer.json").unlink(), ("tokenizer.json", "missing")),
    "template": (lambda new: (new / "chat_template.jinja").write_text("{{ x }}"), ("chat template",)),
    "generation config": (
        lambda new: (new / "generation_config.json").write_text('{"temperature": 0.3}'),
        ("generation_config.json", "0.3", "None"),
    ),
    "quantization": (
        lambda new: set_field(new, "quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("quantization",),
    ),
    "tying": (lambda new: set_field(new, "tie_word_embeddings", True), ("tie_embeddings", "True", "False")),
    "missing tensor": (
        lambda new: change(new, lambda tensors: tensors.pop("model.norm.weight")),
        ("lacks", "model.norm.weight"),
    ),
    "further tensor": (
        lambda new: change(new, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)})),
        ("has", "model.extra.weight"),
    ),
    "shape": (
        lambda new: change(new, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)})),
        ("model.norm.weight", "[2]"),
    ),
    "dtype": (
        lambda new: change(
            new, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].int()})
        ),
        ("model.norm.weight", "I32"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_another_model_is_refused_with_both_values(pair: tuple[Path, Path], name: str) -> None:
    base, new = pair
    edit, words = DIFFERENCES[name]
    edit(new)
    with pytest.raises(ConfigError) as caught:
        check_swap(base, new)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(pair: tuple[Path, Path], scale: float) -> None:
    base, new = pair
    name = "model.layers.0.self_attn.k_scale"
    change(new, lambda tensors: tensors.update({name: torch.tensor(scale)}))
    with pytest.raises(ConfigError) as caught:
        check_swap(base, new)
    assert name in str(caught.value)


def test_kv_scales_may_come_and_go(pair: tuple[Path, Path]) -> None:
    base, new = pair
    change(base, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}))
    check_swap(base, new)
    check_swap(new, base)


def staged(stager: ProcessStager, done: Event) -> str:
    assert done.wait(GUARD_SECONDS)
    result = stager.result()
    assert result is not None
    return result


def test_process_stages_a_checkpoint(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    stager = ProcessStager(base, done.set)
    stager.start(str(new))
    assert staged(stager, done) == ""
    assert stager.progress() == 100
    stager.check_unchanged(str(new))
    change(new, lambda tensors: tensors["model.norm.weight"].zero_())
    os.utime(new / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConfigError):
        stager.check_unchanged(str(new))


def test_a_broken_file_is_a_reason(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    os.truncate(new / "model.safetensors", 100)
    stager = ProcessStager(base, done.set)
    stager.start(str(new))
    assert "model.safetensors" in staged(stager, done)


def test_a_killed_process_is_a_reason(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    stager = ProcessStager(base, done.set)
    stager.start(str(new))
    assert stager.pid is not None
    os.kill(stager.pid, signal.SIGKILL)
    assert "-9" in staged(stager, done)


def test_the_end_of_a_cancelled_process_is_not_the_result_of_the_next(pair: tuple[Path, Path]) -> None:
    base, new = pair
    stager = ProcessStager(base, lambda: None)
    stager.start(str(new))
    first = stager._run
    stager.cancel()
    stager.start(str(new))
    assert first.process is not None and first.process.wait(GUARD_SECONDS)
    assert stager.result() is None
    stager.cancel()


def test_a_process_that_cannot_start_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = ProcessStager(tmp_path, lambda: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    stager.start(str(tmp_path))
    assert "missing" in (stager.result() or "")
