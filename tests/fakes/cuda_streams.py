"""CUDA streams of a machine without CUDA."""

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class FakeStream:
    """Stream that is known by its number."""

    number: int
    device_index: int = 0


class FakeEvent:
    """Event that takes down the streams in which it was recorded and waited for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.recorded: list[FakeStream] = []
        self.awaited: list[FakeStream] = []

    def record(self, stream: FakeStream) -> None:
        self.recorded.append(stream)

    def wait(self, stream: FakeStream) -> None:
        self.awaited.append(stream)

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.enable_timing and later.enable_timing
        return 0.5


class FakeStreams:
    """Fake of streams and events of `torch.cuda`: the default stream is current at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.events: list[FakeEvent] = []
        self.current = self.default = FakeStream(0)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda: self.default)

    def _make(self) -> FakeStream:
        self.made += 1
        return FakeStream(self.made)

    def _event(self, enable_timing: bool = False) -> FakeEvent:
        self.events.append(FakeEvent(enable_timing))
        return self.events[-1]

    def _set(self, stream: FakeStream) -> None:
        self.current = stream
