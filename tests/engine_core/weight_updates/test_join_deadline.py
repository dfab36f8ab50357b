"""The time that joining a group may take, over doubles of torch's store and group."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine_core.weight_updates import gloo_group, group, nccl_group
from tandem.engine_core.weight_updates.gloo_group import GlooGroup
from tandem.engine_core.weight_updates.group import GroupInfo, time_left

INFO = GroupInfo(1, 2, "127.0.0.1", 4000)


class Clock:
    """A clock that advances by 4 s with each stage, and records the timeouts that they have."""

    def __init__(self) -> None:
        self.now, self.timeouts = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def spend(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout.total_seconds())
        self.now += 4.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Store:
        def __init__(self, *_: Any, timeout: timedelta, **__: Any) -> None:
            clock.spend(timeout)

        def set_timeout(self, timeout: timedelta) -> None:
            self.timeout = timeout

        def get(self, _: str) -> bytes:
            clock.spend(self.timeout)
            return b"id"

    class Group:
        _Options = SimpleNamespace

        def __init__(self, _store: Any, _rank: int, _size: int, options: Any) -> None:
            clock.spend(options._timeout)

        @staticmethod
        def create_device(hostname: str) -> str:
            return hostname

        def allreduce(self, _: Any) -> Any:
            return SimpleNamespace(wait=clock.spend)

    for module in (group, gloo_group, nccl_group):
        monkeypatch.setattr(module, "time", clock)
    for module in (gloo_group, nccl_group):
        monkeypatch.setattr(module, "TCPStore", Store)
    monkeypatch.setattr(gloo_group, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(gloo_group, "ProcessGroupGloo", Group)
    return clock


def test_all_stages_of_gloo_have_one_deadline(clock: Clock) -> None:
    GlooGroup.join(INFO, 10.0)
    assert clock.timeouts == [10.0, 6.0, 2.0]


def test_all_stages_of_the_store_have_one_deadline(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "read_unique_id", lambda data: data)
    assert nccl_group._stored_id(INFO, clock.now + 10.0) == b"id"
    assert clock.timeouts == [10.0, 6.0]


def test_no_timeout_is_0_which_torch_takes_for_none(clock: Clock) -> None:
    assert time_left(clock.now - 5) == timedelta(milliseconds=1)
