"""The version of the weights that a restarted engine loads, by the files that it finds."""

import os
from pathlib import Path

import pytest
import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.startup.runtime import ModelSource
from tandem.engine_core.startup.weights import note_number, open_active
from tandem.protocol.weights_file import WeightsFile, read_weights_file, write_weights_file
from tests.support.model_folder import write_model


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    layout = KVLayout.of_one_group(2, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    return ModelSource(folder, read_config(folder), torch.float32, layout)


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def test_files_that_have_changed_have_a_new_version_after_a_restart(source: ModelSource, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    versions = [open_active(source, file).version for _ in range(2)]
    (source.directory / "other.json").write_text("{}")
    versions.append(open_active(source, file).version)
    touch(source.directory)
    versions += [open_active(source, file).version for _ in range(2)]
    assert versions == ["0", "0", "0", "1", "1"]


def test_no_engine_gives_a_number_again(source: ModelSource, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    assert open_active(source, file).highest == 0
    note_number(file, 4)
    found = open_active(source, file)
    assert (found.version, found.highest) == ("0", 4), "the weights of version 4 were in memory only"
    touch(source.directory)
    found = open_active(source, file)
    assert (found.version, found.highest) == ("5", 5)
    note_number(None, 9)
    note_number(tmp_path / "none" / "weights.json", 9)


def test_the_files_of_a_swap_have_changed(source: ModelSource, tmp_path: Path) -> None:
    file, folder = tmp_path / "weights.json", tmp_path / "swapped"
    folder.mkdir()
    write_model(folder)
    write_weights_file(file, WeightsFile(str(folder), "named"))
    assert open_active(source, file).version == "named", "a file of an engine that kept no stamp"
    touch(folder)
    found = open_active(source, file)
    assert (found.checkpoint.directory, found.version) == (folder, "1")
    assert read_weights_file(file).version == "1"


def test_the_model_serves_again_if_the_files_of_a_swap_are_gone(source: ModelSource, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    write_weights_file(file, WeightsFile(str(tmp_path / "gone"), "7"))
    found = open_active(source, file)
    assert (found.checkpoint.directory, found.version) == (source.directory, "8"), "not 0, which it may differ from"
    assert open_active(source, None).version == "0"
    (source.directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        open_active(source, file)
