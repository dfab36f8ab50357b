"""A driven engine, a trainer in the same process, and the calls between them."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from tandem.protocol.commands import (
    AnyCommand,
    FinishWeightUpdate,
    InitWeightTransfer,
    Pause,
    PauseMode,
    Resume,
    StartWeightUpdate,
    UpdateWeights,
)
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Answer
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.gloo_trainer import GlooTrainer, packed_broadcast
from tests.support.serving import free_port

GUARD = 120.0
SIZES: dict[str, Any] = {"device": "cpu", "max_rows": 4, "threads": 1, "kv_tokens": 2000, "max_len": 256}
BUFFER = 3000


class TrainedEngine:
    """Calls of a trainer to an engine, each with what the trainer does meanwhile."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given = {"enable_weight_updates": True, "update_timeout": GUARD, **SIZES, **options}
        self.driven = DrivenEngine.build(EngineOptions(model=str(folder), **given))
        self.calls = 0
        self.buffer_bytes = BUFFER
        self._trainer: GlooTrainer | None = None

    @property
    def trainer(self) -> GlooTrainer:
        assert self._trainer is not None
        return self._trainer

    def call(self, make: Callable[[int], AnyCommand], beside: Callable[[], object] | None = None) -> Answer:
        """Return the answer of a call; beside: runs in another thread meanwhile."""
        self.calls += 1
        thread = Thread(target=beside, daemon=True) if beside is not None else None
        if thread is not None:
            thread.start()
        inbox, replies = self.driven.mailbox.inbox, self.driven.mailbox.replies
        inbox.append((CLIENT, make(self.calls)))
        until = time.monotonic() + GUARD
        while True:
            self.driven.engine.tick()
            found = [event for _, event in replies if isinstance(event, Answer) and event.call == self.calls]
            if found:
                if thread is not None:
                    thread.join(GUARD)
                return found[0]
            assert time.monotonic() < until, "no answer"

    def pause(self, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        assert self.call(lambda call: Pause(call, mode, clear_cache=clear_cache)).ok

    def resume(self) -> None:
        assert self.call(Resume).ok

    def init(self, buffer_bytes: int = BUFFER) -> None:
        """Let both join a group. buffer_bytes: 0 for a broadcast of each tensor."""
        port, self.buffer_bytes = free_port(), buffer_bytes

        def join() -> None:
            self._trainer = GlooTrainer(port)

        answer = self.call(lambda call: InitWeightTransfer(call, 1, 2, "127.0.0.1", port, b"", buffer_bytes), join)
        assert answer.ok, answer.message

    def start(self) -> None:
        assert self.call(StartWeightUpdate).ok

    def send(self, tensors: dict[str, Tensor], *, named: bool = True) -> Answer:
        """Send tensors. named: False to name none, which stands for those of the call before."""
        names, dtypes, shapes = described(tensors) if named else ([], [], [])
        return self.call(
            lambda call: UpdateWeights(call, names, dtypes, shapes),
            lambda: packed_broadcast(iter(tensors.items()), self.trainer.broadcast, self.buffer_bytes),
        )

    def finish(self, version: str = "") -> Answer:
        return self.call(lambda call: FinishWeightUpdate(call, version))

    def update(self, tensors: dict[str, Tensor], version: str = "") -> None:
        self.start()
        for answer in (self.send(tensors), self.finish(version)):
            assert answer.ok, answer.message


def described(tensors: dict[str, Tensor]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return the names, the dtypes and the shapes of tensors."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return list(tensors), dtypes, [list(tensor.shape) for tensor in tensors.values()]
