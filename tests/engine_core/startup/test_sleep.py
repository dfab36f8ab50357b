"""Engines over real models that sleep and wake on a CPU, where released memory holds zeros afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.protocol.commands import Sleep, WakeUp
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Answer
from tandem.protocol.params import SamplingParams
from tests.engine_core.models import test_llama
from tests.support.engine_driver import CLIENT, DrivenEngine

SIZES: dict[str, Any] = {"device": "cpu", "max_rows": 4, "threads": 1, "kv_tokens": 2000, "max_len": 256}
PARAMS = SamplingParams(24, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 14, 3, 4], list(range(3, 40)), [7]]


class Sleeper:
    """An engine and the answers to its calls."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        given = {"enable_weight_updates": True, "model": None if folder is None else str(folder), **SIZES, **options}
        self.driven = DrivenEngine.build(EngineOptions(**given))
        self.calls = 100

    @property
    def engine(self) -> Any:
        return self.driven.engine

    def call(self, command: Any) -> Answer:
        self.driven.mailbox.inbox.append((CLIENT, command))
        for _ in range(1000):
            self.engine.tick()
            for _, event in self.driven.mailbox.replies:
                if isinstance(event, Answer) and event.call == command.call:
                    return event
        raise AssertionError("no answer")

    def sleep(self, level: int, mode: Any = "abort") -> Answer:
        self.calls += 1
        return self.call(Sleep(self.calls, level, mode))

    def wake(self, *tags: str) -> Answer:
        self.calls += 1
        return self.call(WakeUp(self.calls, list(tags)))

    def generate(self) -> list[list[int]]:
        return self.driven.generate(PROMPTS, [PARAMS] * len(PROMPTS))

    @property
    def weights(self) -> torch.Tensor:
        """All bytes of the weights that are released."""
        memory = self.engine.control.sleep.memory
        return torch.cat(list(memory._memory["weights"].tensors))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    test_llama.save_random(folder, {}, seed=1)
    return folder


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("reserve", [False, True])
def test_weights_come_back(llama: Path, level: int, reserve: bool) -> None:
    engine = Sleeper(llama, sleep_reserve=reserve)
    before, weights = engine.generate(), engine.weights.clone()
    addresses = [tensor.data_ptr() for tensor in engine.engine.control.sleep.memory._memory["weights"].tensors]
    for _ in range(2):
        assert engine.sleep(level) == Answer(engine.calls, True)
        assert engine.engine.stats.sleeping == 1 and not engine.weights.any()
        assert engine.wake() == Answer(engine.calls, True)
        assert engine.engine.stats.sleeping == 0
        assert torch.equal(engine.weights, weights)
        assert engine.generate() == before
    assert addresses == [tensor.data_ptr() for tensor in engine.engine.control.sleep.memory._memory["weights"].tensors]
    assert engine.engine.scheduler.audit() == []
