"""Weights that are replaced in place equal those of a model that loads them first."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs

from tandem.engine_core.errors import ConfigError, WeightsError
from tandem.engine_core.kv_cache.groups import partition
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.startup.file_stamps import weights_stamp
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.weights import ActiveFiles
from tests.support.model_folder import write_model
from tests.support.tiny_llama import CONFIG, random_model


def layout(dtype: torch.dtype) -> KVLayout:
    groups = partition([None] * CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim)
    return KVLayout(groups=groups, page_size=4, dtype=dtype)


def values(weights: ModelWeights) -> list[torch.Tensor]:
    return [slot.target.clone() for slot in weights.model.weight_slots()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_swap_and_back_gives_the_weights_of_a_fresh_load(tmp_path: Path, dtype: torch.dtype) -> None:
    write_model(tmp_path)
    model = random_model(config=CONFIG)
    weights = ModelWeights(model, layout(dtype), torch.float32, 64)
    weights.load(tmp_path, CONFIG)
    fresh, scales = values(weights), model.kv_scales.values.clone()
    addresses = [slot.parameter.data_ptr() for slot in model.weight_slots() if not slot.is_optional]
    with torch.inference_mode():
        for slot in model.weight_slots():
            slot.target.fill_(0.25)
    weights.load(tmp_path, CONFIG)
    assert all(torch.equal(one, other) for one, other in zip(fresh, values(weights), strict=True))
    assert torch.equal(scales, model.kv_scales.values)
    assert addresses == [slot.parameter.data_ptr() for slot in model.weight_slots() if not slot.is_optional]


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_active_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = ModelWeights(random_model(config=CONFIG), layout(torch.float32), torch.float32, 64)
    weights.load(tmp_path, CONFIG)
    before = values(weights)
    for active, is_intact in ((tmp_path, True), (tmp_path / "gone", False)):
        with pytest.raises(WeightsError) as caught:
            weights.swap(tmp_path / "missing", partial(weights.load, active, CONFIG), structs.replace(CONFIG))
        assert caught.value.is_intact is is_intact
    weights.load(tmp_path, CONFIG)
    assert all(torch.equal(one, other) for one, other in zip(before, values(weights), strict=True))


def test_weights_whose_files_have_changed_are_not_loaded_after_a_failed_swap(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = ModelWeights(random_model(config=CONFIG), layout(torch.float32), torch.float32, 64)
    weights.load(tmp_path, CONFIG)
    files = ActiveFiles(weights, CONFIG, tmp_path, weights_stamp(open_checkpoint(tmp_path, CONFIG)))
    for is_intact in (True, False):
        with pytest.raises(WeightsError) as caught:
            weights.swap(tmp_path / "missing", files.reload, CONFIG)
        assert caught.value.is_intact is is_intact
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    # Changed, gone, and in no folder.
    for folder, can_swap in ((tmp_path, True), (tmp_path / "gone", True), (None, False)):
        files.folder = folder
        with pytest.raises(ConfigError) as refused:
            files.reload()
        assert ("tandem swap" in str(refused.value)) is can_swap
