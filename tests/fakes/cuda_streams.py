"""CUDA streams of a machine without CUDA."""

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class FakeStream:
    """Stream that is known by its number."""

    number: int
    device_index: int = 0


class FakeStreams:
    """Stands in for what `torch.cuda` knows of streams: the default one is current at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.current = self.default = FakeStream(0)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda: self.default)

    def _make(self) -> FakeStream:
        self.made += 1
        return FakeStream(self.made)

    def _set(self, stream: FakeStream) -> None:
        self.current = stream
