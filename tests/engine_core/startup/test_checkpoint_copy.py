"""Private copies of staged checkpoints: what they hold, what they refuse, and their end."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.source_file import SourceFile, memory_of
from tandem.engine_core.startup import checkpoint_copy
from tandem.engine_core.startup.checkpoint_copy import CheckpointCopy, fill_copy
from tandem.engine_core.startup.checkpoint_stager import ProcessStager
from tandem.engine_core.startup.served_model import ServedModel
from tandem.protocol.commands import SwapWeights
from tests.engine_core.models.test_llama import save_random
from tests.engine_core.weight_updates.test_engine_updates import expected, generate
from tests.support.engine_driver import CLIENT
from tests.support.model_folder import write_model
from tests.support.serving import until
from tests.support.trained_engine import TrainedEngine

GUARD_SECONDS = 120.0
AMPLE = 2**40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of two shards, with a file of weights that does not belong to them."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    names = list(tensors)
    parts = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ x }}")
    return folder


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Iterator[CheckpointCopy]:
    made = CheckpointCopy.create(source, tmp_path)
    yield made
    made.close()


def size(source: Path) -> int:
    return sum((source / name).stat().st_size for name in ("one.safetensors", "two.safetensors"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in Checkpoint.open(folder).tensors.items():
        found[name] = torch.empty(stored.nbytes, dtype=torch.uint8)
        with SourceFile(stored.path) as file:
            file.read_into(memory_of(found[name]), stored.start)
    return found


def test_a_copy_outlives_the_files(source: Path, copy: CheckpointCopy) -> None:
    before = tensors_of(source)
    assert list(fill_copy(source, copy.path, size(source)))[-1] == 100
    shutil.rmtree(source)
    after = tensors_of(copy.path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (copy.path / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ x }}"
    assert not (copy.path / "consolidated.safetensors").is_symlink()
    folder, descriptors = copy.path, copy.descriptors
    copy.close()
    assert not folder.exists()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_too_little_memory_is_refused_with_both_numbers(source: Path, copy: CheckpointCopy) -> None:
    need = size(source)
    with pytest.raises(ConfigError) as caught:
        list(fill_copy(source, copy.path, need - 1))
    assert all(str(number) in str(caught.value) for number in (need, need - 1))
    assert all(os.fstat(descriptor).st_size == 0 for descriptor in copy.descriptors)


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, 2000),
    "grown": lambda file: os.truncate(file, file.stat().st_size + 1),
    "written": lambda file: os.utime(file, ns=(1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_meanwhile_are_refused(
    source: Path, copy: CheckpointCopy, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(checkpoint_copy, "CHUNK_BYTES", 1024)
    file = source / "one.safetensors"

    def fill() -> None:
        for number, _ in enumerate(fill_copy(source, copy.path, AMPLE)):
            if number == 0:
                CHANGES[change](file)

    with pytest.raises(ConfigError) as caught:
        fill()
    assert str(file) in str(caught.value)


def test_files_that_appear_meanwhile_are_refused(source: Path, copy: CheckpointCopy) -> None:
    (copy.path / "one.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        list(fill_copy(source, copy.path, AMPLE))
    assert str(source / "one.safetensors") in str(caught.value)


def test_a_folder_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        CheckpointCopy.create(tmp_path / "gone", tmp_path)
    assert list(tmp_path.iterdir()) == []


def staged(stager: ProcessStager, folder: Path, done: Event) -> str:
    done.clear()
    stager.start(str(folder))
    assert done.wait(GUARD_SECONDS)
    result = stager.result()
    assert result is not None
    return result


def test_a_process_fills_and_checks_the_copy(source: Path, tmp_path: Path) -> None:
    new, done, parent = tmp_path / "new", Event(), tmp_path / "copies"
    parent.mkdir()
    shutil.copytree(source, new)
    stager = ProcessStager(ServedModel.read(source), done.set, keeps_copy=True, parent=parent)
    assert staged(stager, new, done) == ""
    before = tensors_of(new)
    shutil.rmtree(new)
    folder = stager.staged_folder(str(new))
    assert folder.parent == parent and stager.progress() == 100
    assert all(torch.equal(before[name], found) for name, found in tensors_of(folder).items())
    shutil.copytree(source, new)
    (new / "config.json").write_text((new / "config.json").read_text().replace("LlamaForCausalLM", "Other"))
    reason = staged(stager, new, done)
    assert "Other" in reason and str(new) in reason and str(parent) not in reason
    stager.release()
    assert list(parent.iterdir()) == []


def test_weights_are_loaded_from_the_copy(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        save_random(folder, {"max_position_embeddings": 512}, seed=seed)
    answers = [expected(folder) for folder in folders]
    assert answers[0] != answers[1]
    trained = TrainedEngine(folders[0], swap_copy=True)
    path, driven, swaps = str(folders[1]), trained.driven, trained.driven.engine.control.swaps
    assert swaps is not None
    driven.mailbox.inbox.append((CLIENT, SwapWeights(1000, path, activate=False)))
    driven.engine.tick()
    until(lambda: swaps.stager.result() is not None, "the end of staging")
    driven.engine.tick()
    assert swaps.facts.state == "staged", swaps.facts
    (folders[1] / "model.safetensors").write_bytes(b"changed")
    assert generate(trained) == answers[0]
    answer = trained.call(lambda call: SwapWeights(call, path))
    assert answer.ok and answer.swap is not None and answer.swap.active_path == path
    assert generate(trained) == answers[1]
