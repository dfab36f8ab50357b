"""Which conversation a process renders, what it is given in advance, and what its successor gets."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.chat.render_queue import MAX_BYTES_AHEAD, RenderJob, RenderQueue


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def job(loop: asyncio.AbstractEventLoop, size: int) -> RenderJob:
    return RenderJob(b"x" * size, loop.create_future())


def test_a_process_is_given_requests_up_to_a_number_of_bytes(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    jobs = [job(loop, size) for size in (MAX_BYTES_AHEAD * 2, MAX_BYTES_AHEAD // 2, MAX_BYTES_AHEAD // 2, 1)]
    for one in jobs:
        queue.add(one)
    assert queue.give() == [jobs[0].request]
    assert queue.finish() is jobs[0]
    assert queue.give() == [jobs[1].request, jobs[2].request]
    assert queue.finish() is jobs[1]
    assert queue.give() == [jobs[3].request]


def test_a_conversation_that_nobody_waits_for_is_not_rendered(loop: asyncio.AbstractEventLoop) -> None:
    queue = RenderQueue()
    given_up, other = job(loop, 1), job(loop, 2)
    queue.add(given_up)
    queue.add(other)
    given_up.prompt.cancel()
    assert queue.give() == [other.request]
    assert queue.current is other
    assert len(queue) == 1


@given(st.lists(st.sampled_from(["add", "add large", "give", "finish", "die", "cancel"]), max_size=60))
def test_each_conversation_is_answered_once_and_in_order_unless_its_process_ended(steps: list[str]) -> None:
    """Only the one that was being rendered is lost with a process; the others keep their order."""
    loop = asyncio.new_event_loop()
    queue, added, ended = RenderQueue(), list[RenderJob](), list[RenderJob]()
    for step in steps:
        if step.startswith("add"):
            added.append(job(loop, MAX_BYTES_AHEAD if step == "add large" else 1))
            queue.add(added[-1])
        elif step == "give":
            queue.give()
        elif step == "finish" and queue.current is not None:
            ended.append(queue.finish())
        elif step == "die":
            rendered = queue.current
            assert queue.take_back() is rendered
            ended += [rendered] if rendered is not None else []
        elif step == "cancel" and added:
            added[-1].prompt.cancel()
    while queue.give() or queue.current is not None:
        ended.append(queue.finish())
    loop.close()
    assert len(queue) == 0
    assert [one for one in added if one in ended] == ended
    assert all(one in ended or one.prompt.cancelled() for one in added)
