"""An engine in this process with adapters."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.engine_core.lora.adapters import Adapters
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.adapters_file import AdaptersFile, write_adapters
from tandem.protocol.commands import AnyCommand, Hello, LoadAdapter, UnloadAdapter
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Answer
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.ticking_event import ticking
from tests.support.engine_driver import CLIENT, EPOCH, DrivenEngine

SECONDS = 60.0
"""Longest wait for an adapter."""


class LoraEngine(DrivenEngine):
    """An engine with adapters, which calls can load and unload."""

    _calls = 0

    @classmethod
    def start(
        cls,
        model: Path,
        adapters: Mapping[str, Path] | None = None,
        new_parts: Callable[[str], DeviceParts] = open_parts,
        **options: Any,
    ) -> "LoraEngine":
        """Build an engine; adapters: folders by name, that it has from the start."""
        file = model / "adapters.json"
        write_adapters(file, AdaptersFile.initial({name: str(path) for name, path in (adapters or {}).items()}))
        return cls.restart(model, new_parts, **options)

    @classmethod
    def restart(cls, model: Path, new_parts: Callable[[str], DeviceParts] = open_parts, **options: Any) -> "LoraEngine":
        """Build an engine with the adapters of the one before."""
        file = model / "adapters.json"
        usual = {"device": "cpu", "threads": 1, "max_rows": 8, "enable_lora": True, "max_lora_rank": 16}
        mailbox, given = FakeMailbox(), EngineOptions(model=str(model), **usual | options)
        engine = build_engine(given, mailbox, Status(EPOCH, new_stats()), ticking(new_parts), adapters_file=file)
        mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "test")))
        return cls(engine, mailbox)

    @property
    def adapters(self) -> Adapters:
        adapters = self.engine.scheduler.adapters
        assert adapters is not None
        return adapters

    def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        while len(self.mailbox.outcomes) < self._requests:
            if not self.engine.tick():
                time.sleep(0.001)
            assert time.monotonic() < deadline, f"{self.engine.pipeline}, {self.adapters.names}"
        while self.engine.tick():
            pass
        assert self.engine.scheduler.audit() == []

    def call(self, command: AnyCommand) -> Answer | None:
        """Send a command; return its answer if it came at once."""
        self.mailbox.inbox.append((CLIENT, command))
        self.engine.tick()
        return self.answer()

    def answer(self) -> Answer | None:
        """Return the answer to the last call, None if it has not come."""
        found = [event for _, event in self.mailbox.replies if isinstance(event, Answer) and event.call == self._calls]
        return found[0] if found else None

    def await_answer(self) -> Answer:
        deadline = time.monotonic() + SECONDS
        while (answer := self.answer()) is None:
            assert time.monotonic() < deadline
            if not self.engine.tick():
                time.sleep(0.001)
        return answer

    def load(self, name: str, path: Path, load_inplace: bool = False, root: str = "") -> Answer:
        self.begin_load(name, path, load_inplace, root)
        return self.await_answer()

    def begin_load(self, name: str, path: Path, load_inplace: bool = False, root: str = "") -> Answer | None:
        self._calls += 1
        return self.call(LoadAdapter(self._calls, name, str(path), load_inplace, root))

    def begin_unload(self, name: str) -> Answer | None:
        self._calls += 1
        return self.call(UnloadAdapter(self._calls, name))

    def ask(self, prompt: Sequence[int], adapter: str = "", count: int = 8, **wanted: Any) -> int:
        """Submit a greedy request; return its id."""
        return self.submit(prompt, SamplingParams(count, temperature=0.0, ignore_eos=True), adapter=adapter, **wanted)

    def answers(self, *asked: tuple[Sequence[int], str]) -> list[list[int]]:
        """Return the tokens of requests that run together: prompts, each with its adapter."""
        ids = [self.ask(prompt, adapter) for prompt, adapter in asked]
        self.run()
        return [self.tokens(request_id) for request_id in ids]
