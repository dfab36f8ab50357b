"""Adapters take turns in slots: names, versions, the order of eviction, drains, and what the loader is asked for."""

from random import Random

import pytest

from tandem.engine_core.adapter import Adapter, cache_namespace
from tandem.engine_core.contracts import LoadResult
from tandem.engine_core.errors import RequestError
from tandem.engine_core.lora.adapters import MAX_WAIT_SECONDS, Adapters
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import AdapterList
from tests.fakes.adapter_loader import FakeAdapterLoader

CLIENT = b"c"


class World:
    def __init__(self, slots: int) -> None:
        self.loader, self.saved = FakeAdapterLoader(), list[tuple[AdapterList, int]]()
        self.adapters = Adapters(slots, self.loader, lambda listed, version: self.saved.append((listed, version)))
        self.now = 0.0

    def load(self, name: str, replaces: bool = False, problem: str = "") -> Adapter | None:
        """Load an adapter, to its answer."""
        assert self.adapters.load(CLIENT, 1, name, f"/{name}", replaces) == ""
        self.loader.results.append(LoadResult(max(self.loader.read_paths), 0, 8, problem))
        self.adapters.advance(self.now)
        (answer,) = self.adapters.take_answers()
        assert answer == (CLIENT, 1, problem)
        return self.adapters.names.get(name)

    def finish_place(self, problem: str = "") -> dict[Adapter, str]:
        version, slot = self.loader.placed[-1]
        self.loader.results.append(LoadResult(version, slot, 8, problem))
        return self.adapters.advance(self.now)


def loaded(world: World, name: str) -> Adapter:
    adapter = world.load(name)
    assert adapter is not None
    world.adapters.open(adapter)
    return adapter


def test_a_name_is_served_once_it_was_read() -> None:
    world = World(1)
    with pytest.raises(RequestError) as caught:
        world.adapters.find("a")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert world.load("a", problem="no file") is None
    assert world.saved == []
    adapter = world.load("a")
    assert adapter is world.adapters.find("a") and adapter.version == 2
    listed, next_version = world.saved[-1]
    assert [(facts.name, facts.path, facts.version) for facts in listed.adapters] == [("a", "/a", 2)]
    assert next_version == 3


def test_a_name_is_loaded_twice_only_in_place() -> None:
    world = World(1)
    world.load("a")
    assert "loaded already" in world.adapters.load(CLIENT, 2, "a", "/b", False)
    assert world.adapters.load(CLIENT, 2, "a", "/b", True) == ""
    assert "being loaded" in world.adapters.load(CLIENT, 3, "a", "/c", True)


def test_a_sequence_waits_until_its_adapter_is_in_a_slot() -> None:
    world = World(2)
    adapter = loaded(world, "a")
    assert (world.adapters.defers(adapter) and world.loader.placed == [(1, 2)]) or world.loader.placed == [(1, 1)]
    assert world.adapters.defers(adapter), "the copy is under way"
    assert len(world.loader.placed) == 1
    world.finish_place()
    assert not world.adapters.defers(adapter)


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    world = World(2)
    first, second, third = (loaded(world, name) for name in "abc")
    for adapter in (first, second):
        world.adapters.defers(adapter)
        world.finish_place()
    release = world.adapters.acquire(first)
    world.adapters.close(first)
    world.adapters.close(second)
    release()  # used last, and idle again
    assert world.adapters.defers(third)
    assert second.slot == 0 and third.slot and first.slot
    world.finish_place()
    assert not world.adapters.defers(third) and world.adapters.defers(second)


def test_an_adapter_with_rows_keeps_its_slot() -> None:
    world = World(1)
    first, second = loaded(world, "a"), loaded(world, "b")
    world.adapters.defers(first)
    world.finish_place()
    release = world.adapters.acquire(first)
    for _ in range(3):
        assert world.adapters.defers(second)
        world.adapters.advance(world.now)
    assert first.slot == 1 and len(world.loader.placed) == 1
    world.adapters.close(first)
    release()
    world.adapters.advance(world.now)
    assert (first.slot, second.slot) == (0, 1)


def test_an_adapter_that_was_placed_for_a_waiting_sequence_stays_until_another_is_late() -> None:
    world = World(1)
    first, second = loaded(world, "a"), loaded(world, "b")
    world.adapters.defers(first)
    world.finish_place()
    assert world.adapters.defers(second) and first.slot
    world.adapters.advance(MAX_WAIT_SECONDS)
    assert second.slot and not first.slot


def test_after_half_a_second_the_adapter_with_the_fewest_rows_takes_no_more() -> None:
    world = World(2)
    busy, calm, late = (loaded(world, name) for name in "abc")
    for adapter in (busy, calm):
        world.adapters.defers(adapter)
        world.finish_place()
    kept = [world.adapters.acquire(busy) for _ in range(2)]
    release = world.adapters.acquire(calm)
    assert world.adapters.defers(late)
    world.adapters.advance(MAX_WAIT_SECONDS - 0.01)
    assert not calm.is_draining and not world.adapters.defers(calm)
    world.adapters.advance(MAX_WAIT_SECONDS + 0.01)
    assert calm.is_draining and not busy.is_draining
    assert world.adapters.defers(calm) and not world.adapters.defers(busy)
    release()
    world.adapters.advance(MAX_WAIT_SECONDS + 0.02)
    assert late.slot and not calm.slot and not calm.is_draining
    for call in kept:
        call()


def test_an_unload_waits_for_the_sequences_that_it_has() -> None:
    world = World(1)
    adapter = loaded(world, "a")
    world.adapters.open(adapter)  # two sequences, as of one request with n = 2
    world.adapters.defers(adapter)
    world.finish_place()
    releases = [world.adapters.acquire(adapter) for _ in range(2)]
    assert world.adapters.unload(CLIENT, 5, "a") == ""
    with pytest.raises(RequestError):
        world.adapters.find("a")
    for release in releases:
        assert world.adapters.take_answers() == []
        world.adapters.close(adapter)
        release()
    assert world.adapters.take_answers() == [(CLIENT, 5, "")]
    assert world.loader.dropped == [1] and adapter.slot == 0
    assert "not loaded" in world.adapters.unload(CLIENT, 6, "a")


def test_sequences_keep_the_version_that_they_began_with() -> None:
    world = World(2)
    old = loaded(world, "a")
    world.adapters.defers(old)
    world.finish_place()
    release = world.adapters.acquire(old)
    new = world.load("a", replaces=True)
    assert new is not None and new is not old and new.version > old.version
    assert old.slot and world.adapters.find("a") is new
    world.adapters.open(new)
    world.adapters.defers(new)
    world.finish_place()
    assert new.slot != old.slot
    world.adapters.close(old)
    release()
    assert old.slot == 0 and world.loader.dropped == [old.version]


def test_files_are_read_once_for_each_load() -> None:
    """SkyRL#1606: an adapter that replaces another is not read again by the steps that use it."""
    world = World(1)
    world.load("a")
    new = world.load("a", replaces=True)
    assert new is not None
    for _ in range(3):
        world.adapters.open(new)
        if world.adapters.defers(new):
            world.finish_place()
        release = world.adapters.acquire(new)
        world.adapters.close(new)
        release()
        world.adapters.advance(world.now)
    assert len(world.loader.read_paths) == 2 and len(world.loader.placed) == 1


def test_waiting_sequences_of_an_adapter_that_cannot_be_placed_are_told() -> None:
    world = World(1)
    adapter = loaded(world, "a")
    world.adapters.defers(adapter)
    assert world.finish_place("the files have changed") == {adapter: "the files have changed"}
    assert adapter.slot == 0
    assert world.adapters.defers(adapter) and len(world.loader.placed) == 2


def test_an_adapter_that_nobody_waits_for_any_more_gets_no_slot() -> None:
    world = World(1)
    first, second = loaded(world, "a"), loaded(world, "b")
    world.adapters.defers(first)
    world.finish_place()
    release = world.adapters.acquire(first)
    world.adapters.defers(second)
    world.adapters.close(second)
    release()
    world.adapters.advance(1.0)
    assert second.slot == 0 and first.slot == 1


def test_random_traffic_never_shares_a_slot_or_loses_one() -> None:
    for seed in range(30):
        random = Random(seed)
        world = World(random.randint(1, 3))
        adapters = world.adapters
        waiting: list[Adapter] = []
        running: list[tuple[Adapter, object]] = []
        for step in range(300):
            world.now = step / 10
            action = random.random()
            name = random.choice("abcdef")
            if action < 0.1:
                if adapters.load(CLIENT, step, name, "/", random.random() < 0.5) == "":
                    world.loader.results.append(LoadResult(max(world.loader.read_paths), 0, 8))
            elif action < 0.15:
                adapters.unload(CLIENT, step, name)
            elif action < 0.6 and name in adapters.names:
                adapter = adapters.find(name)
                adapters.open(adapter)
                waiting.append(adapter)
            elif running:
                adapter, release = running.pop(random.randrange(len(running)))
                adapters.close(adapter)
                release()  # type: ignore[operator]
            while world.loader.placed:
                version, slot = world.loader.placed.pop()
                world.loader.results.append(LoadResult(version, slot, 8))
            adapters.advance(world.now)
            for adapter in list(waiting):
                if not adapters.defers(adapter) and len(running) < 4:
                    waiting.remove(adapter)
                    running.append((adapter, adapters.acquire(adapter)))
            slots = [adapter.slot for adapter in adapters._residents]
            assert len(slots) == len(set(slots)) and 0 not in slots
            assert sorted([*slots, *adapters._free]) == list(range(1, adapters.max_slots + 1))
            assert all(adapter.slot for adapter, _ in running)
        for _ in range(100):
            world.now += 0.01
            while world.loader.placed:
                version, slot = world.loader.placed.pop()
                world.loader.results.append(LoadResult(version, slot, 8))
            adapters.advance(world.now)
            for adapter in list(waiting):
                if not adapters.defers(adapter):
                    waiting.remove(adapter)
                    running.append((adapter, adapters.acquire(adapter)))
            for adapter, release in running:
                adapters.close(adapter)
                release()  # type: ignore[operator]
            running.clear()
        assert not waiting, f"seed {seed}: sequences that never got their adapter"
        for name in list(adapters.names):
            adapters.unload(CLIENT, 0, name)
        assert not adapters._residents and not adapters._retired and not adapters._wanted


def test_namespaces_of_the_cache_are_all_different() -> None:
    salts = ("", "x", "1", "\0", "\0k\0x", "\1", "\0011\0x", "\0012\0")
    versions = (0, 1, 2, 11)
    found = {cache_namespace(w, version, salt) for w in versions for version in versions for salt in salts}
    assert len(found) == 16 * len(salts)
    assert cache_namespace(0, 0, "x") == b"x"
