"""Engines over real models that sleep and wake on a CPU, where released memory holds zeros afterwards."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.engine_core.startup.engine import resolve_engine
from tandem.protocol.commands import PauseMode, Sleep, StartWeightUpdate, SwapWeights, WakeUp
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Answer
from tandem.protocol.params import SamplingParams
from tests.engine_core.models import test_qwen3_5
from tests.engine_core.models.test_llama import save_random
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.weight_updates.test_engine_updates import expected, generate, weights_of
from tests.support.model_folder import write_model
from tests.support.trained_engine import TrainedEngine

PROMPTS = [[5, 9, 14, 3, 4], list(range(3, 40)), [7]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for seed in (1, 2):
        directory = tmp_path_factory.mktemp(f"model{seed}")
        save_random(directory, {"max_position_embeddings": 512}, seed=seed)
        found.append(directory)
    return found


def sleep(engine: TrainedEngine, level: int, mode: PauseMode = "abort") -> Answer:
    return engine.call(lambda call: Sleep(call, level, mode))


def wake(engine: TrainedEngine, *tags: str) -> Answer:
    return engine.call(lambda call: WakeUp(call, list(tags)))


def outputs(engine: TrainedEngine, length: int = 12) -> list[list[int]]:
    params = SamplingParams(length, temperature=0.0, ignore_eos=True)
    return engine.driven.generate(PROMPTS, [params] * len(PROMPTS))


def memory_of(engine: TrainedEngine) -> SleepingMemory:
    memory = engine.driven.engine.control.sleep.memory
    assert isinstance(memory, SleepingMemory)
    return memory


def weights_in(engine: TrainedEngine) -> list[Tensor]:
    """Return the weights that a sleep releases, as bytes."""
    return list(memory_of(engine)._memory["weights"].tensors)


def check_sleeps(engine: TrainedEngine, level: int) -> None:
    """Check that outputs, weights and addresses are the same after two sleeps, and that nothing remains within."""
    before = outputs(engine)
    weights = [tensor.clone() for tensor in weights_in(engine)]
    addresses = [tensor.data_ptr() for tensor in weights_in(engine)]
    for _ in range(2):
        assert sleep(engine, level).ok
        assert not any(tensor.any() for tensor in weights_in(engine))
        assert not any(tensor.any() for tensor in memory_of(engine)._memory["kv_cache"].tensors)
        assert wake(engine).ok
        assert all(map(torch.equal, weights_in(engine), weights))
        assert [tensor.data_ptr() for tensor in weights_in(engine)] == addresses
        assert outputs(engine) == before
    assert engine.driven.engine.scheduler.audit() == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("reserve", [False, True])
def test_weights_come_back(folders: list[Path], level: int, reserve: bool) -> None:
    check_sleeps(TrainedEngine(folders[0], sleep_reserve=reserve), level)


@pytest.mark.parametrize("level", [1, 2])
def test_noise_comes_back(folders: list[Path], level: int) -> None:
    check_sleeps(TrainedEngine(folders[0], load_format="dummy"), level)


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_comes_back(tmp_path: Path, level: int) -> None:
    write_model(tmp_path, MODEL)
    engine = TrainedEngine(tmp_path, speculate=f"model:{tmp_path}", speculate_tokens=3, max_len=64)
    check_sleeps(engine, level)
    stats = engine.driven.engine.stats
    drafted, accepted = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
    assert drafted == accepted > 30, "the target as its own draft model is always right"


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_with_recurrent_layers_comes_back(tmp_path: Path, level: int) -> None:
    test_qwen3_5.save_random(tmp_path, {})
    engine = TrainedEngine(tmp_path, max_len=128)
    check_sleeps(engine, level)
    kv = engine.driven.engine.runtime.kv  # type: ignore[attr-defined]
    held = {tensor.untyped_storage().data_ptr() for tensor in (kv.pool, *kv.recurrent[0].tensors, kv.checkpoints.bases)}
    assert held <= {tensor.data_ptr() for tensor in memory_of(engine)._memory["kv_cache"].tensors}


def test_requests_that_are_kept_continue(folders: list[Path]) -> None:
    engine = TrainedEngine(folders[0])
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    whole = engine.driven.generate(PROMPTS, [params] * len(PROMPTS))
    ids = [engine.driven.submit(prompt, params) for prompt in PROMPTS]
    for _ in range(12):
        engine.driven.engine.tick()
    assert sleep(engine, 1, "keep").ok and wake(engine).ok
    begun = [len(engine.driven.tokens(number)) for number in ids]
    engine.driven.run()
    assert all(0 < count < 40 for count in begun)
    assert [engine.driven.tokens(number) for number in ids] == whole


def test_a_trainer_fills_dropped_weights_before_the_pool_is_awake(folders: list[Path]) -> None:
    engine = TrainedEngine(folders[0])
    engine.init()
    assert generate(engine) == expected(folders[0])
    assert sleep(engine, 2).ok
    assert not engine.call(StartWeightUpdate).ok, "its weights are asleep"
    assert wake(engine, "weights").ok
    weights = engine.driven.engine.control.weights
    assert weights.problem
    engine.update(weights_of(folders[1]), "new")
    assert weights.is_complete and not weights.problem
    assert wake(engine, "kv_cache").ok
    assert generate(engine) == expected(folders[1])

    assert sleep(engine, 2).ok and wake(engine).ok
    assert not weights.is_complete, "the weights of the trainer are in no folder"
    engine.update(weights_of(folders[1]), "again")
    assert generate(engine) == expected(folders[1])


def test_a_sleep_in_the_middle_of_an_update_is_refused_even_with_weights_that_were_dropped(folders: list[Path]) -> None:
    engine, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    engine.init()
    assert sleep(engine, 2).ok and wake(engine, "weights").ok
    engine.start()
    names = list(tensors)
    assert engine.send({name: tensors[name] for name in names[:3]}).ok
    for level in (1, 2):
        assert not sleep(engine, level).ok, "it would drop tensors that count as received"
    assert engine.send({name: tensors[name] for name in names[3:]}).ok
    assert engine.finish().ok
    assert wake(engine, "kv_cache").ok
    assert generate(engine) == expected(folders[1])

    engine.pause()
    engine.start()
    assert engine.send({name: tensors[name] for name in names[:3]}).ok
    assert not engine.finish().ok
    assert sleep(engine, 2).ok, "the update was given up"


def test_a_swap_fills_dropped_weights(folders: list[Path]) -> None:
    engine = TrainedEngine(folders[0])
    assert sleep(engine, 2).ok
    path = str(folders[1])
    assert not engine.call(lambda call: SwapWeights(call, path)).ok, "its weights are asleep"
    assert wake(engine, "weights").ok
    assert engine.call(lambda call: SwapWeights(call, path, "abort")).ok
    assert wake(engine, "kv_cache").ok
    assert generate(engine) == expected(folders[1])
    assert sleep(engine, 2).ok and wake(engine).ok
    assert generate(engine) == expected(folders[1]), "the folder of the swap"


def rewrite(folder: Path, source: Path) -> None:
    """Put the weights of another checkpoint in place of those of a folder."""
    shutil.copy(source / "model.safetensors", folder / "new")
    (folder / "new").rename(folder / "model.safetensors")


def test_files_that_changed_during_a_sleep_are_not_loaded_under_the_version_before(
    folders: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    engine = TrainedEngine(tmp_path)
    before = generate(engine)
    weights = engine.driven.engine.control.weights
    version = weights.version.name
    assert sleep(engine, 2).ok
    rewrite(tmp_path, folders[1])
    for _ in range(2):
        answer = wake(engine)
        assert not answer.ok and not answer.lacks_memory and str(tmp_path) in answer.message
        assert engine.driven.engine.stats.sleeping == 1
    assert wake(engine, "weights").ok and weights.problem
    assert not wake(engine).ok, "the weights are as they were"
    assert engine.call(lambda call: SwapWeights(call, str(tmp_path))).ok
    assert wake(engine, "kv_cache").ok
    assert generate(engine) == expected(folders[1]) != before
    assert weights.version.name != version
    assert sleep(engine, 2).ok and wake(engine).ok
    assert generate(engine) == expected(folders[1]), "the files of the swap"
    assert sleep(engine, 1).ok
    rewrite(tmp_path, folders[0])
    assert wake(engine).ok, "level 1 has a copy"
    assert generate(engine) == expected(folders[1])


def test_an_engine_that_keeps_its_weights_allocates_as_usual(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = TrainedEngine(folders[0], enable_weight_updates=False)
    assert engine.driven.engine.control.sleep.memory is None
    assert "a sleep releases" not in caplog.text
    answer = sleep(engine, 1)
    assert not answer.ok and "--enable-weight-updates" in answer.message


def test_a_reserve_without_sleep_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sleep-reserve"):
        resolve_engine(EngineOptions(sleep_reserve=True), cuda=False)
