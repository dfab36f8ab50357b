"""Requests survive the loss of their engine as long as nothing of their answer was sent."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.streams import DraftCounts
from tandem.protocol.codec import step_output, with_details
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode
from tests.fakes.engine_link import FACTS, FakeLink, connect, heartbeat, install
from tests.support.effort import EFFORT
from tests.support.engine_world import HOLD, LENGTH, World
from tests.support.refusals import numbers_in


@pytest.fixture(scope="module", autouse=True)
def no_sockets() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


def run(scenario: Callable[[World], Awaitable[None]]) -> World:
    """Run a scenario; whatever it was, nothing is left at its end."""

    async def main() -> World:
        world = World()
        await scenario(world)
        await asyncio.gather(*[one.task for one in world.requests if not one.task.cancelled()])
        assert (world.client.num_open, world.client.num_held) == (0, 0)
        assert sample(world, "tandem_frontend_num_requests_running") == 0
        return world

    return asyncio.run(main())


def sample(world: World, name: str) -> float:
    return world.metrics.registry.get_sample_value(name) or 0.0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("code", [None, ErrorCode.ENGINE_FAILED, ErrorCode.SHUTTING_DOWN])
def test_a_request_without_output_is_answered_by_the_next_engine(stream: bool, code: ErrorCode | None) -> None:
    async def scenario(world: World) -> None:
        first = await world.engine()
        asked = await world.ask(2, stream)
        await world.start(0)
        await (world.lose() if code is None else world.fail(code))
        assert not asked.task.done() and world.client.num_held == 1
        second = await world.engine()
        old, new = first.submitted, second.submitted
        assert [one.sampling for one in new] == [one.sampling for one in old]
        assert {one.request_id for one in new}.isdisjoint({one.request_id for one in old})
        assert {one.http_request_id for one in new} == {asked.name}
        await world.finish()
        assert asked.error is None and asked.texts == asked.expected

    world = run(scenario)
    assert sample(world, "tandem_frontend_resubmitted_requests_total") == 1
    assert sample(world, "tandem_frontend_engine_losses_total") == 1


def test_drafts_of_a_lost_engine_are_not_counted() -> None:
    async def scenario(world: World) -> None:
        def report(link: FakeLink, drafts: list[int]) -> None:
            ids = [one.request_id for one in link.submitted]
            link.streams.deliver(with_details(step_output(0, [], []), [], ids, drafts))

        first = await world.engine()
        asked = await world.ask(2, stream=False)
        report(first, [3, 2, 1, 3, 0, 0])
        await world.step(0, LENGTH - 1)
        assert asked.generation.drafts() == DraftCounts(6, 2, 3, 2)
        await world.lose()
        report(await world.engine(), [7, 4, 1, 5, 1, 1])
        await world.finish()
        assert asked.texts == asked.expected
        assert asked.generation.drafts() == DraftCounts(12, 5, 12, 5)

    run(scenario)


def test_a_whole_reply_begins_anew_after_any_output() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(2, stream=False)
        await world.step(0, LENGTH)
        await world.step(0, 3)
        await world.lose()
        await world.engine()
        assert asked.generation.usage().completion_tokens == 0
        await world.finish()
        assert asked.texts == asked.expected
        assert asked.generation.usage().completion_tokens == 2 * LENGTH

    world = run(scenario)
    assert sample(world, "tandem_frontend_generation_tokens_total") == 2 * LENGTH
    assert sample(world, "tandem_time_to_first_token_seconds_count") == 2


def test_a_stream_with_output_ends_with_the_loss() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(2)
        await world.step(0, 1)
        await world.lose()
        assert asked.error is not None and asked.error.code == "engine_unavailable"
        assert world.client.num_held == 0

    run(scenario)


def test_output_that_arrives_together_with_the_loss_is_not_sent() -> None:
    async def scenario(world: World) -> None:
        link = await world.engine()
        asked = await world.ask()
        link.emit(link.submitted[0].request_id, [60])
        world.client._on_break("gone")
        await world.settle()
        assert asked.texts == [""] and world.client.num_held == 1
        await world.finish()
        assert asked.texts == asked.expected

    run(scenario)


def test_a_failure_of_the_request_itself_is_not_repeated() -> None:
    async def scenario(world: World) -> None:
        link = await world.engine()
        asked = await world.ask(stream=False)
        link.fail([link.submitted[0].request_id], ErrorCode.MODEL_FAILED)
        await world.settle()
        assert asked.error is not None and asked.error.code == "model_failed"

    run(scenario)


@pytest.mark.parametrize(("runs", "engines"), [(True, 2), (False, 3)])
def test_a_request_that_loses_engine_after_engine_ends_with_its_error(runs: bool, engines: int) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        for number in range(1, engines + 1):
            assert not asked.task.done()
            await world.engine()
            assert [command.lost_engines for command in world.links[-1].submitted] == [number - 1]
            if runs:
                await world.start(0)
            await world.fail(ErrorCode.ENGINE_FAILED)
            assert asked.task.done() == (number == engines)
        assert asked.error is not None and asked.error.status == 500
        assert numbers_in(asked.error.message)[:1] == [engines]
        await world.engine()
        assert world.by_name(world.links[-1]) == []

    run(scenario)


def test_waiting_requests_come_first_and_new_ones_last() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        ran = [await world.ask() for _ in range(2)]
        await world.start(0)
        await world.start(1)
        waited = [await world.ask() for _ in range(2)]
        await world.lose()
        link = await world.engine()
        new = await world.ask()
        assert world.by_name(link) == [one.name for one in (*waited, *ran, new)]
        await world.finish()

    run(scenario)


def test_a_request_is_given_up_after_the_hold_timeout() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        await world.lose()
        await world.later(HOLD - 1)
        assert not asked.task.done()
        await world.later(1)
        assert asked.error is not None
        assert (asked.error.status, asked.error.code) == (503, "engine_unavailable")
        assert "60 s (--hold-timeout)" in asked.error.message

    run(scenario)


def test_a_request_is_not_sent_to_an_engine_with_another_model() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        await world.lose()
        link = await world.engine(structs.replace(FACTS, max_len=1024, created=9))
        assert link.submitted == []
        assert asked.error is not None
        assert (asked.error.status, asked.error.code) == (503, "engine_unavailable")

    run(scenario)


def test_a_request_survives_the_restart_of_an_engine_at_another_time() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        await world.lose()
        await world.engine(structs.replace(FACTS, created=9))
        await world.finish()
        assert asked.error is None

    run(scenario)


def test_a_request_is_not_sent_to_an_engine_that_is_refused() -> None:
    async def scenario(world: World) -> None:
        world.client._fingerprints = Fingerprints("a" * 64)
        await world.engine()
        asked = await world.ask()
        await world.lose()
        world.epoch += 1
        connect(world.client, world.epoch, structs.replace(FACTS, tokenizer_fingerprint="b" * 64))
        await world.settle()
        assert asked.error is not None and asked.error.status == 503
        assert "tokenizer.json" in asked.error.message

    run(scenario)


def test_a_shutdown_ends_held_requests_and_holds_no_more() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        held = await world.ask()
        await world.lose()
        await world.engine()
        running = await world.ask()
        await world.lose()
        world.client.end_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        await world.settle()
        for asked in (held, running):
            assert asked.error is not None and asked.error.code == "shutting_down"

    run(scenario)


def test_a_shutdown_ends_requests_in_progress() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask()
        world.client.end_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        await world.settle()
        assert asked.error is not None and asked.error.message == "the server is shutting down"

    run(scenario)


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        await world.ask(2, stream=False)
        await world.lose()
        assert world.client.num_held == 1
        await world.leave(0)
        link = await world.engine()
        assert link.submitted == []

    run(scenario)


def test_a_request_admitted_while_the_engine_was_lost_waits_for_the_next() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        await world.lose()
        asked = await world.ask(2)
        assert world.client.num_held == 1
        await world.engine()
        await world.finish()
        assert asked.texts == asked.expected

    run(scenario)


@pytest.mark.parametrize("sent", [0, 1, 2, 3])
def test_a_link_that_breaks_while_requests_are_submitted_again_loses_none(sent: int) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        requests = [await world.ask(2) for _ in range(2)]
        await world.lose()
        world.epoch += 1
        world.client._on_heartbeat(heartbeat(world.epoch))
        assert world.link is not None
        world.link.breaks_after = sent
        world.link.answer()
        await world.settle()
        assert world.client.num_held + sum(one.task.done() for one in requests) == 2
        await world.finish()
        assert [one.texts for one in requests] == [one.expected for one in requests]

    run(scenario)


def test_an_engine_that_fails_a_request_and_lives_on_gets_it_again() -> None:
    async def scenario(world: World) -> None:
        link = await world.engine()
        asked = await world.ask()
        link.fail([link.submitted[0].request_id], ErrorCode.ENGINE_FAILED)
        await world.settle()
        await world.later(1.0)
        assert len(link.submitted) == 1
        await world.later(1.0)
        assert len(link.submitted) == 2
        world.ended.add(link.submitted[0].request_id)
        await world.finish()
        assert asked.texts == asked.expected

    run(scenario)


def test_a_held_stream_is_kept_alive() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(waits=(0.001, 0.001))
        await world.lose()
        while asked.keep_alives < 3:
            await asyncio.sleep(0.001)
        await world.finish()
        assert asked.texts == asked.expected

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "running", "held"])
def test_a_request_that_takes_too_long_ends_with_504_and_is_aborted(phase: str, stream: bool) -> None:
    async def scenario(world: World) -> None:
        link = await world.engine()
        asked = await world.ask(2, stream, timeout=0.02 if phase == "queued" else 3600.0)
        if phase == "running":
            await world.step(0, 1)
        elif phase == "held":
            await world.lose()
        if phase != "queued":  # whose timer may ring at any time
            asked.generation._expire(3600.0)
        await asyncio.wait([asked.task])
        assert asked.error is not None
        assert (asked.error.status, asked.error.code) == (504, "deadline_exceeded")
        assert link.submitted == [] or phase == "held"
        aborted = world.metrics.registry.get_sample_value("tandem_frontend_aborts_total", {"reason": "deadline"})
        assert aborted == (None if phase == "held" else 2)

    run(scenario)


def test_a_request_that_is_answered_in_time_has_no_deadline_left() -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        asked = await world.ask(timeout=3600.0)
        await world.finish()
        assert asked.texts == asked.expected
        deadline = asked.generation._deadline
        assert deadline is not None and deadline.cancelled()

    run(scenario)


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("start"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(0, 9), st.integers(1, LENGTH)),
    st.tuples(st.just("lose")),
    st.tuples(st.just("fail"), st.sampled_from([ErrorCode.ENGINE_FAILED, ErrorCode.SHUTTING_DOWN])),
    st.tuples(st.just("engine")),
    st.tuples(st.just("later"), st.sampled_from([0.3, 2.0, 20.0])),
    st.tuples(st.just("leave"), st.integers(0, 9)),
)


@settings(max_examples=60 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, max_size=30))
@example([("ask", 2, False), ("step", 0, 4), ("lose",), ("engine",), ("step", 0, 4), ("lose",), ("engine",)])
def test_every_request_ends_once_whatever_happens_to_engines(actions: list[tuple[Any, ...]]) -> None:
    async def scenario(world: World) -> None:
        await world.engine()
        for name, *arguments in actions:
            await getattr(world, name)(*arguments)
        await world.finish()

    world = run(scenario)
    engines: defaultdict[str, set[int]] = defaultdict(set)
    ran: defaultdict[str, set[int]] = defaultdict(set)
    numbers: list[int] = []
    for index, link in enumerate(world.links):
        for command in link.sent:
            if isinstance(command, Submit):
                numbers.append(command.request_id)
                engines[command.http_request_id].add(index)
                if command.request_id in world.started:
                    ran[command.http_request_id].add(index)
    assert len(numbers) == len(set(numbers))
    for asked in world.requests:
        assert len(engines[asked.name]) <= 3 and len(ran[asked.name]) <= 2
        if asked.error is None and not asked.task.cancelled():
            assert asked.texts == asked.expected
        elif asked.stream:
            assert all(whole.startswith(text) for whole, text in zip(asked.expected, asked.texts, strict=True))
        else:
            assert asked.texts == [""] * len(asked.texts)
        assert asked.error is None or asked.error.status in (500, 503)
