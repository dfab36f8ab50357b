"""A whole engine whose weights were lost by a failed swap."""

import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from tandem.engine_core.startup import model_weights
from tandem.protocol.commands import SwapWeights
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Answer, Failure
from tests.engine_core.models.test_llama import save_random
from tests.engine_core.weight_updates.test_engine_updates import PROMPT, expected, generate, params
from tests.support.engine_driver import CLIENT
from tests.support.serving import until
from tests.support.trained_engine import TrainedEngine


def swap(trained: TrainedEngine, folder: Path) -> Answer:
    """Stage a checkpoint with the process of its own, and swap to it."""
    swaps, driven = trained.driven.engine.control.swaps, trained.driven
    assert swaps is not None
    driven.mailbox.inbox.append((CLIENT, SwapWeights(1000, str(folder), activate=False)))
    driven.engine.tick()
    until(lambda: swaps.stager.result() is not None, "the end of staging")
    driven.engine.tick()
    assert swaps.facts.state == "staged", swaps.facts
    return trained.call(lambda call: SwapWeights(call, str(folder)))


def test_the_next_swap_recovers_weights_that_could_not_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        save_random(folder, {"max_position_embeddings": 512}, seed=seed)
    trained = TrainedEngine(folders[0])
    weights, driven = trained.driven.engine.control.weights, trained.driven
    before = generate(trained)
    os.utime(folders[0] / "model.safetensors", ns=(1, 1))  # They may hold other weights now.
    with monkeypatch.context() as patched:
        fails_once = Mock(wraps=model_weights.load_weights, side_effect=[OSError("the disk is gone"), DEFAULT])
        patched.setattr(model_weights, "load_weights", fails_once)
        answer = swap(trained, folders[1])
    assert not answer.ok and "the disk is gone" in answer.message
    assert weights.facts.state == "incomplete"
    request = driven.submit(PROMPT, params())
    driven.run()
    outcome = driven.outcome(request)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    answer = swap(trained, folders[1])
    assert answer.ok, answer.message
    assert (weights.facts.state, weights.facts.problem) == ("ready", "")
    assert generate(trained) == expected(folders[1]) != before
