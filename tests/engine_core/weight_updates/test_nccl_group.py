"""The calls of NCCL, on a double of its library."""

import ctypes
import socket
import struct
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.weight_updates import nccl_group
from tandem.engine_core.weight_updates.group import GroupInfo, TransferError
from tandem.engine_core.weight_updates.hosts import parse_hosts
from tandem.engine_core.weight_updates.nccl_group import MAGIC, NcclGroup
from tests.support import nccl_trainer
from tests.support.nccl_trainer import NcclTrainer
from tests.support.serving import free_port

LOOPBACK = parse_hosts("127.0.0.0/8")
ID = (bytes(8) + struct.pack("<H", socket.AF_INET) + struct.pack("!H4s", 1, bytes((127, 0, 0, 1)))).ljust(128, b"\1")
SYSTEM_ERROR = 2


class FakeNccl:
    """Records calls; operations are in progress for `polls` polls."""

    def __init__(self, polls: int = 2, result: int = 7, state: int = 0) -> None:
        self.calls: list[str] = []
        self.polls, self.result, self.state = polls, result, state
        self.broadcast: tuple[int, int, int] | None = None
        self._left = 0

    def ncclGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return b"unhandled system error" if result == SYSTEM_ERROR else b"?"

    def ncclGetUniqueId(self, unique_id: Any) -> int:  # noqa: N802
        ctypes.memmove(unique_id._obj, ID, len(ID))
        return 0

    def ncclCommInitRankConfig(self, comm: Any, ranks: Any, identity: Any, rank: Any, config: Any) -> int:  # noqa: N802
        comm._obj.value = 77
        self.calls.append(f"init {ranks.value} {rank.value}")
        assert bytes(identity) == ID
        assert config._obj.magic == MAGIC and config._obj.blocking == 0
        self._left = self.polls
        return self.result

    def ncclAllReduce(self, send: Any, recv: Any, count: Any, kind: int, op: int, comm: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append(f"all_reduce {count.value} {kind} {op}")
        assert send.value == recv.value and comm.value == 77 and stream.value == 5
        return self.result

    def ncclBroadcast(self, send: Any, recv: Any, count: Any, kind: int, root: int, comm: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append(f"broadcast {count.value} {kind} {root}")
        assert send.value == recv.value and comm.value == 77 and stream.value == 5
        self._left = self.polls
        return self.result

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:  # noqa: N802
        self._left -= 1
        state._obj.value = 7 if self._left > 0 else self.state
        return 0

    def ncclCommAbort(self, comm: Any) -> int:  # noqa: N802
        self.calls.append(f"abort {comm.value}")
        return 0


class Stream:
    cuda_stream = 5


class Event:
    def record(self, _: Any) -> None: ...
    def query(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, _: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)


def join(library: FakeNccl, info: GroupInfo | None = None, seconds: float = 30.0) -> NcclGroup:
    info = info or GroupInfo(1, 2, unique_id=ID)
    return NcclGroup.join(info, seconds, torch.device("cpu"), LOOPBACK, library)


@pytest.mark.parametrize("result", [0, 7])
def test_joining_initializes_without_blocking_and_reduces_one_element(result: int) -> None:
    library = FakeNccl(result=result)
    group = join(library)
    buffer = torch.zeros(10, dtype=torch.uint8)
    group.receive(buffer, 30.0)
    group.close()
    group.close()
    assert library.calls == ["init 2 1", "all_reduce 1 7 0", "broadcast 10 1 0", "abort 77"]
    with pytest.raises(TransferError, match="closed"):
        group.receive(buffer, 1.0)


def test_an_operation_that_takes_too_long_is_aborted() -> None:
    library = FakeNccl()
    group = join(library)
    library.polls = 10**9
    with pytest.raises(TransferError, match="--update-timeout"):
        group.receive(torch.zeros(4, dtype=torch.uint8), 0.01)
    assert library.calls[-1] == "abort 77"


@pytest.mark.parametrize("field", ["result", "state"])
def test_errors_of_the_library_abort_the_group(field: str) -> None:
    library = FakeNccl()
    group = join(library)
    setattr(library, field, SYSTEM_ERROR)
    with pytest.raises(TransferError, match="unhandled system error"):
        group.receive(torch.zeros(4, dtype=torch.uint8), 30.0)
    assert library.calls[-1] == "abort 77"


def test_an_id_of_another_host_is_not_contacted() -> None:
    library = FakeNccl()
    other = ID[:12] + bytes((8, 8, 8, 8)) + ID[16:]
    with pytest.raises(TransferError, match="--weight-update-hosts"):
        join(library, GroupInfo(1, 2, unique_id=other))
    assert library.calls == []


def test_the_id_is_read_from_the_store_of_the_trainer() -> None:
    library = FakeNccl()
    with patch.object(nccl_group, "_stored_id", return_value=ID) as stored:
        join(library, GroupInfo(1, 2, "127.0.0.1", 4000))
    assert stored.call_count == 1 and library.calls[0] == "init 2 1"


def test_the_trainer_of_tests_publishes_the_id_that_it_joins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    library, port = FakeNccl(), free_port()
    monkeypatch.setattr(nccl_trainer, "load_library", lambda: library)
    trainer = NcclTrainer(port, torch.device("cpu"))
    assert nccl_group._stored_id(GroupInfo(1, 2, "127.0.0.1", port), time.monotonic() + 120.0) == ID
    trainer.broadcast(torch.zeros(10, dtype=torch.uint8))
    assert library.calls == ["init 2 0", "all_reduce 1 7 0", "broadcast 10 1 0"]


def test_the_config_has_the_layout_of_the_library() -> None:
    config = nccl_group._Config
    offsets = [getattr(config, name).offset for name in ("size", "magic", "version", "blocking")]
    assert offsets == [0, 8, 12, 16] and ctypes.sizeof(config) == 24
