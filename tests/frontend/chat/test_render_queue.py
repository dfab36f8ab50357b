"""Which conversation a process renders, what it is given in advance, and what its successor gets."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.render_queue import MAX_SENT, MAX_SENT_BYTES, REFILL_SENT, RenderJob, RenderQueue

COUNTS = {"many": 20, "few": 2, "one": 1}
"""Conversations of each API key."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def job(loop: asyncio.AbstractEventLoop, size: int, client: str = "") -> RenderJob:
    return RenderJob(b"x" * size, loop.create_future(), client)


def test_a_process_is_given_requests_up_to_a_number_of_bytes(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    jobs = [job(loop, size) for size in (MAX_SENT_BYTES * 2, MAX_SENT_BYTES // 2, MAX_SENT_BYTES // 2, 1)]
    for one in jobs:
        queue.add(one)
    assert queue.next_frames() == [jobs[0].request]
    assert queue.finish() is jobs[0]
    assert queue.next_frames() == [jobs[1].request, jobs[2].request]
    assert queue.finish() is jobs[1]
    assert queue.next_frames() == [jobs[3].request]


def test_a_conversation_that_nobody_waits_for_is_not_rendered(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    given_up, other = job(loop, 1), job(loop, 2)
    queue.add(given_up)
    queue.add(other)
    given_up.prompt.cancel()
    assert queue.next_frames() == [other.request]
    assert queue.current is other
    assert len(queue) == 1


def test_a_process_is_given_several_requests_in_one_write_and_no_more_until_it_has_few(
    loop: asyncio.AbstractEventLoop,
) -> None:
    queue = RenderQueue()
    for _ in range(3 * MAX_SENT):
        queue.add(job(loop, 1))
    assert len(queue.next_frames()) == MAX_SENT
    for _ in range(MAX_SENT - REFILL_SENT):
        assert queue.next_frames() == []
        queue.finish()
    assert len(queue.next_frames()) == MAX_SENT - REFILL_SENT


def test_keys_take_turns_and_conversations_of_one_key_keep_their_order(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    jobs = {client: [job(loop, number, client) for number in range(1, count + 1)] for client, count in COUNTS.items()}
    for added in jobs.values():
        for one in added:
            queue.add(one)
    order: list[RenderJob] = []
    while queue.next_frames() or queue.current is not None:
        order.append(queue.finish())
    for added in jobs.values():
        assert [one for one in order if one in added] == added
    assert [one.client for one in order] == ["many", "few", "one", "many", "few", *["many"] * 18]


def test_a_conversation_that_is_tried_again_comes_before_all_others(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    jobs = [job(loop, 1, client) for client in ("a", "b", "c")]
    for one in jobs:
        queue.add(one)
    queue.next_frames()
    guilty = queue.take_back()
    assert guilty is jobs[0]
    queue.add(job(loop, 1, "d"))
    queue.retry(guilty)
    assert len(queue) == 4
    queue.next_frames()
    assert [queue.finish().client for _ in range(4)] == ["a", "b", "c", "d"]


@given(st.lists(st.sampled_from(["add", "add large", "give", "finish", "die", "cancel"]), max_size=60))
def test_each_conversation_is_answered_once_and_in_order_unless_its_process_ended(steps: list[str]) -> None:
    """Only one that was rendered by two processes that ended is lost; all keep their order."""
    loop = asyncio.new_event_loop()
    queue, added, ended = RenderQueue(), list[RenderJob](), list[RenderJob]()
    for step in steps:
        if step.startswith("add"):
            added.append(job(loop, MAX_SENT_BYTES if step == "add large" else 1))
            queue.add(added[-1])
        elif step == "give":
            queue.next_frames()
        elif step == "finish" and queue.current is not None:
            ended.append(queue.finish())
        elif step == "die":
            rendered = queue.current
            assert queue.take_back() is rendered
            if rendered is not None and rendered.num_deaths < 1:
                rendered.num_deaths += 1
                queue.retry(rendered)
            elif rendered is not None:
                ended.append(rendered)
        elif step == "cancel" and added:
            added[-1].prompt.cancel()
    while queue.next_frames() or queue.current is not None:
        ended.append(queue.finish())
    loop.close()
    assert len(queue) == 0
    assert [one for one in added if one in ended] == ended
    assert all(one in ended or one.prompt.cancelled() for one in added)
