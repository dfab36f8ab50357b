"""The wait for the memory of a GPU that another process still holds."""

from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core import __main__ as process
from tandem.engine_core.errors import ConfigError, DeviceBusyError, MemoryTooSmallError
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.startup import engine as startup
from tandem.engine_core.startup.device_memory import (
    MAX_WAIT_SECONDS,
    SETTLED_SECONDS,
    MemoryDemand,
    dummy_bytes,
    memory_demand,
    wait_for_memory,
    weight_bytes,
)
from tandem.engine_core.startup.engine import resolve_engine
from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ExitCode
from tandem.protocol.events import Phase
from tests.fakes.clock import FakeClock
from tests.fakes.counted_device import CountedDevice
from tests.fakes.mailbox import FakeMailbox
from tests.support.model_folder import write_model
from tests.support.refusals import numbers_in


class SharedDevice(CountedDevice):
    """Device with memory that another process holds until a time; `lost` of it for good."""

    def __init__(self, clock: FakeClock, held: int, until: float, kept: int = 0) -> None:
        super().__init__()
        self.clock, self.held, self.until, self.kept = clock, held, until, kept

    def total_bytes(self) -> int:
        return 80 * GIB

    def free_bytes(self) -> int:
        return self.total_bytes() - (self.held if self.clock.now < self.until else self.kept)


def waited(held: int, until: float, kept: int, demand: MemoryDemand) -> tuple[bool, float, list[str]]:
    """Return whether the memory became free, after how many seconds, and the heartbeat's detail."""
    clock = FakeClock()
    begin = clock.now
    status, said = Status(1, new_stats()), list[str]()

    def sleep(seconds: float) -> None:
        assert status.phase is Phase.LOADING
        said.append(status.detail)
        clock.advance(seconds)

    found = wait_for_memory(SharedDevice(clock, held, begin + until, kept), demand, status, clock, sleep)
    return found, clock.now - begin, said


DEMAND = MemoryDemand(needed=20 * GIB, wanted=72 * GIB)


def test_free_memory_is_not_waited_for() -> None:
    assert waited(8 * GIB, 0, 8 * GIB, DEMAND) == (True, 0.0, [])


def test_memory_of_a_killed_predecessor_is_waited_for_and_the_heartbeat_reports_it() -> None:
    found, seconds, said = waited(76 * GIB, 12.0, 0, DEMAND)
    assert (found, seconds) == (True, 12.0)
    (detail,) = set(said)
    assert numbers_in(detail) == [4, 72]


def test_memory_that_stays_held_is_given_up_after_the_bound() -> None:
    found, seconds, _ = waited(76 * GIB, 1e9, 0, DEMAND)
    assert (found, seconds) == (False, MAX_WAIT_SECONDS)


def test_neighbour_that_leaves_enough_costs_a_start_little() -> None:
    found, seconds, _ = waited(30 * GIB, 1e9, 0, DEMAND)
    assert (found, seconds) == (False, SETTLED_SECONDS)


def test_memory_that_comes_back_in_parts_is_waited_for() -> None:
    found, seconds, said = waited(76 * GIB, 5.0, 20 * GIB, DEMAND)
    assert (found, seconds) == (False, 5.0 + SETTLED_SECONDS), "enough to start, and nothing changes any more"
    assert numbers_in(said[-1]) == [60, 72]


@pytest.mark.parametrize(
    ("options", "pool", "wanted"),
    [
        ({}, 0, int(80 * GIB * 0.9)),
        ({"gpu_memory": 0.5}, 0, 40 * GIB),
        ({"kv_memory": 3 * GIB}, 3 * GIB, 0),
        ({"kv_tokens": 1000}, 1000 * 128, 0),
    ],
)
def test_demand_follows_from_checkpoint_and_flags(
    tmp_path: Path, options: dict[str, Any], pool: int, wanted: int
) -> None:
    write_model(tmp_path)
    resolved = resolve_engine(EngineOptions(model=str(tmp_path), device="cuda", **options), cuda=True)
    assert resolved.source.layout.token_bytes == 128 * 2
    checkpoint = open_checkpoint(tmp_path, resolved.source.model)
    stored = weight_bytes(resolved.source, checkpoint)
    assert dummy_bytes(resolved.source) == stored + 2 * 2 * 4, "with a scale of keys and of values for each layer"
    demand = memory_demand(resolved.config, resolved.source, stored, 80 * GIB)
    weights = demand.needed - (pool if "kv_memory" in options else pool * 2)
    assert 0 < weights == stored < 2**20
    assert demand.wanted == (wanted or demand.needed)


class TestStart:
    @pytest.fixture
    def build(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        write_model(tmp_path)
        options = EngineOptions(model=str(tmp_path), device="cuda", max_rows=2, load_format="dummy")
        monkeypatch.setattr(startup.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(startup.torch.cuda, "mem_get_info", lambda: (0, 80 * GIB))

        def too_small(*_: object) -> None:
            raise MemoryTooSmallError("the KV pool has 0 tokens")

        monkeypatch.setattr(startup, "build_runtime", too_small)

        def build(has_memory: bool) -> None:
            monkeypatch.setattr(startup, "wait_for_memory", lambda *_: has_memory)
            parts = startup.open_parts("cpu")
            startup.build_engine(options, FakeMailbox(), Status(1, new_stats()), lambda _: parts)

        return build

    def test_memory_that_another_process_holds_is_no_error_of_the_settings(self, build: Any) -> None:
        with pytest.raises(DeviceBusyError, match=r"\b0\b"):
            build(False)

    def test_memory_that_never_suffices_is_an_error_of_the_settings(self, build: Any) -> None:
        with pytest.raises(ConfigError, match=r"\b0\b"):
            build(True)


def test_exit_code_distinguishes_a_busy_device_from_bad_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["engine", "--endpoint", "ipc:///nowhere"])
    for error, code in ((DeviceBusyError("busy"), ExitCode.BUSY), (MemoryTooSmallError("small"), ExitCode.CONFIG)):

        def serve(_arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(process, "serve", serve)
        assert process.main() == code
        assert caplog.messages[-1] == str(error)
