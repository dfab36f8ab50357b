"""Shared memory between the loop and a worker, from both sides."""

import os
import time
from array import array
from collections.abc import Iterator
from random import Random
from threading import Thread

import pytest

from tandem.engine_core.constraints.workers import channel as channel_module
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    ACCEPTED,
    FAILED,
    FORCES,
    FORCES_MORE,
    MASK,
    MAX_FORCED,
    MAX_OPERATIONS,
    MAX_SLOTS,
    STOPPED,
    Channel,
    create_memory,
    map_memory,
)

WAIT_SECONDS = 60.0
"""Time after which a test takes a batch for lost."""


@pytest.fixture
def sides() -> Iterator[tuple[Channel, Channel]]:
    """The engine's side and the worker's, each with a mapping of its own."""
    memory_fd, wake_fd = create_memory(), os.eventfd(0, os.EFD_NONBLOCK)
    engine, worker = (Channel(map_memory(memory_fd), wake_fd) for _ in range(2))
    os.close(memory_fd)
    yield engine, worker
    engine.close()


def operations(*numbers: int) -> "array[int]":
    return array("i", numbers)


@pytest.mark.parametrize("count", [0, 1, MAX_FORCED, MAX_FORCED + 1])
@pytest.mark.parametrize("slot", [0, 7, MAX_SLOTS - 1])
def test_a_state_is_read_as_it_was_written(sides: tuple[Channel, Channel], slot: int, count: int) -> None:
    engine, worker = sides
    forced = list(range(1000, 1000 + count))
    worker.write_forced(slot, forced)
    worker.flags[slot] = ACCEPTED | FORCES
    assert engine.flags[slot] == ACCEPTED | FORCES
    assert engine.forced(slot) == forced[:MAX_FORCED]
    worker.flags[slot] = ACCEPTED
    assert engine.forced(slot) == [], "what was forced before is not read"


def test_states_of_neighbours_are_apart(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    for slot in range(MAX_SLOTS):
        worker.flags[slot] = FORCES | slot % 8
        worker.write_forced(slot, [slot] * (slot % (MAX_FORCED + 1)))
        worker.has_mask[slot] = slot % 3 == 0
    for slot in range(MAX_SLOTS):
        assert engine.flags[slot] == FORCES | slot % 8
        assert engine.forced(slot) == [slot] * (slot % (MAX_FORCED + 1))
        assert engine.has_mask[slot] == (slot % 3 == 0)


def test_a_batch_of_the_largest_size_arrives(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    numbers = list(range(3 * MAX_OPERATIONS))
    engine.post(operations(*numbers))
    assert not engine.is_done and not engine.has_accepted
    assert worker.next_batch().tolist() == numbers
    worker.write_forced(MAX_SLOTS - 1, range(MAX_FORCED))
    worker.finish_accepting()
    assert engine.has_accepted and not engine.is_done
    worker.finish_batch(0)
    assert engine.has_accepted and engine.is_done
    engine.post(operations(ACCEPT, 1, -7))
    assert worker.next_batch().tolist() == [ACCEPT, 1, -7], "nothing is left of the larger one"


def test_more_than_a_batch_is_refused(sides: tuple[Channel, Channel]) -> None:
    engine, _ = sides
    with pytest.raises(AssertionError, match=rf"\b{MAX_OPERATIONS + 1}\b"):
        engine.post(operations(*range(3 * MAX_OPERATIONS + 3)))
    engine.post(operations(ACCEPT, 1, 2))
    with pytest.raises(AssertionError, match=r"\b1\b"):
        engine.post(operations(ACCEPT, 1, 2))


def test_refused_masks_are_counted_over_all_batches(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    for refused in (2, 0, 3):
        engine.post(operations(MASK, 0, 0))
        worker.next_batch()
        worker.finish_batch(refused)
    assert engine.num_refused == 5


def test_a_worker_that_is_awake_gets_no_event(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    engine.post(operations(ACCEPT, 1, 2))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(engine.wake_fd)
    assert len(worker.next_batch()) == 3


def test_a_batch_posted_while_the_worker_lies_down_is_seen(
    sides: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event that was written needlessly ends the next sleep early, which does no harm."""
    engine, worker = sides
    monkeypatch.setattr(channel_module, "ASLEEP_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(channel_module, "AWAKE_SECONDS", 0.0)

    class PostingFence:
        def __enter__(self) -> None:
            self.number += 1
            if self.number % 2:
                engine.post(operations(ACCEPT, 1, self.number))

        def __exit__(self, *exception: object) -> None:
            return None

        number = 0

    worker._fence = PostingFence()  # type: ignore[assignment]
    for number in (1, 3, 5):
        assert worker.next_batch().tolist() == [ACCEPT, 1, number]
        worker.finish_batch(0)


def test_no_batch_is_lost_between_two_threads(sides: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses around the time after which the worker lies down; nothing but the event wakes it."""
    engine, worker = sides
    monkeypatch.setattr(channel_module, "ASLEEP_SECONDS", 10 * WAIT_SECONDS)
    monkeypatch.setattr(channel_module, "AWAKE_SECONDS", 0.0004)
    random, num_batches = Random(3), 1500
    pauses = [random.choice((0.0, 0.0002, 0.0004, 0.0005, 0.001)) for _ in range(2 * num_batches)]

    def work() -> None:
        for pause in pauses[num_batches:]:
            batch = worker.next_batch().tolist()
            for index in range(0, len(batch), 3):
                worker.flags[batch[index + 1]] = ACCEPTED | FORCES
                worker.write_forced(batch[index + 1], [batch[index + 2]])
            if pause == 0.001:
                time.sleep(pause)
            worker.finish_batch(0)

    thread = Thread(target=work, daemon=True)
    thread.start()
    for number, pause in enumerate(pauses[:num_batches]):
        slots = random.sample(range(MAX_SLOTS), random.randrange(1, 6))
        engine.post(operations(*(part for slot in slots for part in (ACCEPT, slot, number + slot))))
        until = time.monotonic() + WAIT_SECONDS
        while not engine.is_done:
            time.sleep(0)
            assert time.monotonic() < until, f"batch {number} is lost"
        assert [engine.forced(slot) for slot in slots] == [[number + slot] for slot in slots]
        if pause:
            time.sleep(pause)
    thread.join()


def test_closing_twice_closes_one_descriptor(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    worker.flags[1] = FAILED
    wake_fd = engine.wake_fd
    engine.close()
    read_fd, write_fd = os.pipe()
    try:
        assert wake_fd in (read_fd, write_fd), "the number is free again"
        engine.close()
        os.write(write_fd, b"x")
        assert os.read(read_fd, 1) == b"x"
        assert engine.flags[1] == FAILED
    finally:
        os.close(read_fd)
        os.close(write_fd)


class TestDropForced:
    """The worker keeps what it has computed of a run of forced tokens."""

    def test_each_token_of_a_run_but_the_last_is_dropped(self, sides: tuple[Channel, Channel]) -> None:
        engine, worker = sides
        for slot in (3, 4, 5):
            worker.write_forced(slot, [70, 71, 71, 72])
            worker.flags[slot] = FORCES | FORCES_MORE
        for left, token in ((3, 70), (2, 71), (1, 71)):
            assert worker.drop_forced(4, token)
            assert engine.forced(4) == [70, 71, 71, 72][-left:] and engine.num_forced[4] == left
            assert engine.flags[4] == ACCEPTED | FORCES | FORCES_MORE, "the rest is unchanged"
        assert not worker.drop_forced(4, 72), "what follows the last one has to be computed"
        assert engine.forced(4) == [72] and engine.num_forced[4] == 1
        assert [engine.forced(slot) for slot in (3, 5)] == [[70, 71, 71, 72]] * 2
        assert [engine.flags[slot] for slot in (3, 5)] == [FORCES | FORCES_MORE] * 2

    @pytest.mark.parametrize("token", [71, 72, 0, -1, 3])
    def test_another_token_than_the_next(self, sides: tuple[Channel, Channel], token: int) -> None:
        engine, worker = sides
        worker.write_forced(9, [70, 71, 72])
        worker.flags[9] = FORCES
        assert not worker.drop_forced(9, token)
        assert engine.forced(9) == [70, 71, 72] and engine.flags[9] == FORCES

    def test_nothing_is_forced_without_the_flag(self, sides: tuple[Channel, Channel]) -> None:
        """What the slot's matcher had forced before is still in the memory."""
        engine, worker = sides
        worker.write_forced(9, [70, 71, 72])
        for flags in (0, ACCEPTED, FAILED | STOPPED):
            worker.flags[9] = flags
            assert not worker.drop_forced(9, 70)
            assert engine.flags[9] == flags
        worker.flags[9] = FORCES
        assert engine.forced(9) == [70, 71, 72]

    @pytest.mark.parametrize("slot", [0, MAX_SLOTS - 1])
    def test_a_slot_that_never_had_any(self, sides: tuple[Channel, Channel], slot: int) -> None:
        engine, worker = sides
        worker.flags[slot] = FORCES
        assert not worker.drop_forced(slot, 0)
        assert engine.num_forced[slot] == 0 and engine.flags[slot] == FORCES


def test_number_of_forced_tokens_of_all_slots(sides: tuple[Channel, Channel]) -> None:
    engine, worker = sides
    for slot in range(MAX_SLOTS):
        worker.write_forced(slot, [5] * (slot % (MAX_FORCED + 4)))
    expected = [min(MAX_FORCED, slot % (MAX_FORCED + 4)) for slot in range(MAX_SLOTS)]
    assert engine.num_forced.tolist() == expected
