"""Thousands of random traffics against a sequential reference."""

import pytest

from engine_core.errors import FatalError
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished
from tests.sim.world import Shape, World

SEEDS_A_BATCH = 250
SHAPES = {
    "immediate": Shape(depth=2, constrained=0.0),
    "deferred": Shape(depth=2, constrained=1.0),
    "mixed": Shape(depth=2, constrained=0.4),
    "blocking": Shape(depth=1, constrained=0.3),
}


def check_tokens(world: World) -> int:
    """Every request that was heard of: its tokens are the reference's, or a prefix of them where it was cut short."""
    refused = 0
    for request in world.requests:
        outcomes = world.mailbox.outcomes.get(request.key, [])
        if not outcomes:
            assert request.key in world.aborted or request.client in world.mailbox.gone, f"{request} was never answered"
            continue
        tokens, expected, outcome = world.mailbox.received[request.key], request.reference(), outcomes[0]
        if isinstance(outcome, Failure):
            assert tokens == expected[: len(tokens)], request
            refused += 1
        elif outcome.reason is FinishReason.ABORT:
            assert tokens == expected[: len(tokens)], request
        else:
            assert tokens == expected, f"{request}: {tokens}, reference {expected}"
            stopped = bool(expected) and expected[-1] in request.end_ids and len(expected) > request.params.min_tokens
            assert outcome.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    return refused


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_same_tokens_as_one_by_one(name: str, batch: int) -> None:
    launches = overlaps = 0
    for seed in range(batch * SEEDS_A_BATCH, (batch + 1) * SEEDS_A_BATCH):
        world = World(seed, SHAPES[name])
        try:
            world.engine.run()
            check_tokens(world)
            world.check_at_rest()
        except Exception as error:
            raise AssertionError(f"traffic {name}, seed {seed}: {error}") from error
        launches += world.launches
        overlaps += world.overlaps
    if SHAPES[name].depth == 2:
        assert overlaps > launches / 2, f"only {overlaps} of {launches} launches had a step in flight before them"
    else:
        assert overlaps == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_cannot_be_staged_fails_alone(depth: int) -> None:
    raised = failed = 0
    for seed in range(300):
        world = World(seed, Shape(depth, constrained=0.2, faults="row"))
        try:
            world.engine.run()
            check_tokens(world)
            world.check_at_rest()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        raised += world.runtime.raised
        failed += sum(
            isinstance(o, Failure) and o.code is ErrorCode.ENGINE_FAILED
            for outcomes in world.mailbox.outcomes.values()
            for o in outcomes
        )
    assert raised > 100
    assert failed == raised


@pytest.mark.parametrize("place", ["launch", "sample", "collect"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_error_ends_every_stream_once(place: str, depth: int) -> None:
    fatal = 0
    for seed in range(300):
        world = World(seed, Shape(depth, constrained=0.2, faults=place))
        try:
            if world.runtime.fault and _runs_into_fatal(world):
                fatal += 1
                assert all(
                    isinstance(o, Finished | Failure) for outcomes in world.mailbox.outcomes.values() for o in outcomes
                )
                world.arrivals.clear()
            world.check_at_rest()
            _check_prefixes(world)
        except Exception as error:
            raise AssertionError(f"fault in {place}, seed {seed}: {error}") from error
    assert fatal > 50


def _runs_into_fatal(world: World) -> bool:
    try:
        world.engine.run()
    except FatalError:
        return True
    return False


def _check_prefixes(world: World) -> None:
    for request in world.requests:
        tokens = world.mailbox.received.get(request.key, [])
        assert tokens == request.reference()[: len(tokens)], request
