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
from tandem.protocol.commands import MAX_NAME_BYTES
from tandem.protocol.weights_file import WeightsFile, read_weights_file, write_weights_file
from tests.support.model_folder import write_model


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    layout = KVLayout.of_one_group(2, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    return ModelSource(folder, read_config(folder), torch.float32, layout)


def touch(folder: Path, time: int = 1) -> None:
    os.utime(folder / "model.safetensors", ns=(time, time))


def test_files_that_have_changed_have_a_new_version_after_a_restart(source: ModelSource, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    versions = [open_active(source, file).version for _ in range(2)]
    (source.directory / "other.json").write_text("{}")
    versions.append(open_active(source, file).version)
    touch(source.directory)
    versions += [open_active(source, file).version for _ in range(2)]
    assert versions == ["0", "0", "0", "1", "1"]


@pytest.mark.parametrize("highest", [4, 10**15 - 1, 10**MAX_NAME_BYTES - 1])
def test_no_engine_gives_a_number_again(source: ModelSource, tmp_path: Path, highest: int) -> None:
    file = tmp_path / "weights.json"
    assert open_active(source, file).highest == 0
    note_number(file, highest)
    found = open_active(source, file)
    assert (found.version, found.highest) == ("0", highest), "the weights of that version were in memory only"
    for next_one in (highest + 1, highest + 2):
        touch(source.directory, next_one % 10)
        found = open_active(source, file)
        assert (found.version, found.highest) == (str(next_one), next_one)
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
