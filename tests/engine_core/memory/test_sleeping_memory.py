"""What a sleep releases and a wake restores, and each failure on the way."""

from collections.abc import Callable, Collection

import pytest
import torch

from tandem.engine_core.errors import ConfigError, DeviceMemoryError, SleepError
from tandem.engine_core.memory.backup import FileBackup
from tandem.engine_core.memory.host_memory import HostMemory
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.protocol.commands import SLEEP_TAGS, SleepTag


class Limited(HostMemory):
    """Memory whose restoring can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = False
        self.fault: Exception | None = None

    def release(self) -> None:
        super().release()
        self.is_released = True

    def restore(self) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.is_released = False


class Parts:
    """Two weights, of which the second is a table, and a pool."""

    def __init__(self) -> None:
        self.weights, self.cache, self.backup = Limited(), Limited(), FileBackup()
        self.weight = self.weights.allocate(100).fill_(1)
        self.table = self.weights.allocate(50).fill_(2)
        self.pool = self.cache.allocate(30).fill_(3)
        self.free, self.cached = 1000, 0
        """Bytes that are free, and those that the allocator keeps for itself until it releases what is unused."""
        self.draft: Callable[[], None] = lambda: None
        self.reload: Callable[[], bool] = lambda: True
        self.memory = SleepingMemory(
            self.weights,
            self.cache,
            self.backup,
            [1],
            lambda: self.free,
            self.release_unused,
            lambda: self.reload(),
            lambda: self.draft(),
        )

    def release_unused(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    @property
    def values(self) -> tuple[float, float, float]:
        return self.weight.float().mean().item(), self.table.float().mean().item(), self.pool.float().mean().item()


def test_level_one_restores_all_weights_and_an_empty_pool() -> None:
    parts = Parts()
    assert parts.memory.release(SLEEP_TAGS, keep_weights=True) == 180
    assert parts.values == (0, 0, 0)
    parts.memory.restore(SLEEP_TAGS)
    assert parts.values == (1, 2, 0)


def test_level_two_restores_tables_only_and_loads_the_draft_model() -> None:
    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=False)

    def load() -> None:
        parts.weight.fill_(9)

    parts.draft = load
    parts.memory.restore(["weights"])
    assert parts.values == (9, 2, 0)
    assert parts.cache.is_released and not parts.weights.is_released


def test_a_level_one_after_a_level_two_has_a_copy_again() -> None:
    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=False)
    parts.memory.restore(SLEEP_TAGS)
    parts.weight.fill_(5)
    parts.memory.release(SLEEP_TAGS, keep_weights=True)
    parts.memory.restore(SLEEP_TAGS)
    assert parts.values == (5, 2, 0)


@pytest.mark.parametrize(("tags", "needed"), [(["weights"], 150), (["kv_cache"], 30), (["kv_cache", "weights"], 180)])
def test_too_little_free_memory_is_reported_with_both_numbers(tags: Collection[SleepTag], needed: int) -> None:
    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=True)
    parts.free = needed - 1
    with pytest.raises(SleepError, match=rf"{needed}.* {needed - 1}") as caught:
        parts.memory.restore(tags)
    assert caught.value.is_lack and parts.weights.is_released and parts.cache.is_released
    parts.free = needed
    parts.memory.restore(tags)


def test_memory_that_the_allocator_has_kept_during_the_sleep_is_free() -> None:
    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=True)
    parts.free, parts.cached = 30, 150
    parts.memory.restore(SLEEP_TAGS)
    assert parts.values == (1, 2, 0)


@pytest.mark.parametrize("failing", ["weights", "cache"])
@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_memory_that_others_take_meanwhile_leaves_all_released(failing: str, order: list[SleepTag]) -> None:
    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=True)
    getattr(parts, failing).fault = DeviceMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(SleepError, match=r"180.* 1000") as caught:
        parts.memory.restore(order)
    assert caught.value.is_lack and parts.weights.is_released and parts.cache.is_released
    parts.memory.restore(order)
    assert parts.values == (1, 2, 0)


@pytest.mark.parametrize("error", [ConfigError("no such file"), RuntimeError("CUDA error"), OSError(5, "I/O")])
def test_a_draft_model_that_cannot_be_loaded_leaves_all_released(error: Exception) -> None:
    def fail() -> None:
        raise error

    parts = Parts()
    parts.memory.release(SLEEP_TAGS, keep_weights=False)
    parts.draft = fail
    with pytest.raises(SleepError) as caught:
        parts.memory.restore(SLEEP_TAGS)
    assert not caught.value.is_lack and parts.weights.is_released and parts.cache.is_released
    parts.draft = lambda: None
    parts.memory.restore(SLEEP_TAGS)
    assert parts.values[1] == 2


@pytest.mark.parametrize("error", [ConfigError("no such file"), ValueError("a scale"), KeyError("a layer")])
def test_a_reload_that_fails_is_reported(error: Exception) -> None:
    def fail() -> bool:
        raise error

    parts = Parts()
    assert parts.memory.reload()
    parts.reload = fail
    with pytest.raises(SleepError):
        parts.memory.reload()


def test_a_copy_that_fails_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise SleepError("the disk is full", is_lack=True)

    parts = Parts()
    monkeypatch.setattr(parts.backup, "save", fail)
    with pytest.raises(SleepError):
        parts.memory.release(SLEEP_TAGS, keep_weights=True)
    assert torch.equal(parts.weight, torch.ones(100, dtype=torch.uint8)) and parts.values == (1, 2, 3)
