"""Many random traffics against a sequential reference."""

from collections import Counter

import pytest
from msgspec import structs

from tandem.engine_core.errors import FatalError
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, TokenLogprobs
from tests.fakes.model import reference_logits, reference_records
from tests.support.effort import EFFORT
from tests.support.sim_traffic import Request, Shape
from tests.support.sim_world import World

SEEDS = 40 * EFFORT
FAULTY_SEEDS = 36 * EFFORT
SHAPES = {
    "immediate": Shape(depth=2, constrained=0.0),
    "deferred": Shape(depth=2, constrained=1.0),
    "mixed": Shape(depth=2, constrained=0.4),
    "blocking": Shape(depth=1, constrained=0.3),
    "without cache": Shape(depth=2, constrained=0.4, cache=False, sessions=0.0),
    "short of pages": Shape(depth=2, constrained=0.2, cache=True, pages=(10, 30), priorities=True),
    "short of pages and calm": Shape(2, 0.4, pages=(12, 30), priorities=True, requests=20, calm=True),
    "small pages and calm": Shape(1, 0.3, page_size=1, pages=(40, 70), calm=True),
    "conversations": Shape(depth=2, constrained=0.0, cache=True, pages=(60, 140), sessions=0.8, requests=20),
    "static batches": Shape(depth=2, constrained=0.4, static=True),
    "windows": Shape(2, 0.2, windows=(None, 9, 9), sessions=0.3),
    "windows and short of pages": Shape(2, 0.2, cache=True, pages=(12, 40), windows=(None, 12, 5), priorities=True),
    "windows and calm": Shape(1, 0.2, cache=True, pages=(12, 40), windows=(None, 9), requests=20, calm=True),
    "windows without cache": Shape(2, 0.4, cache=False, windows=(None, 9, 9), sessions=0.0),
    "windows in all layers": Shape(2, 0.2, cache=True, pages=(20, 60), windows=(9,), sessions=0.4, requests=20),
    "windows in static batches": Shape(depth=2, constrained=0.4, static=True, windows=(None, 9)),
    "states": Shape(depth=2, constrained=0.2, cache=True, states=(1, 12)),
    "states, blocking": Shape(depth=1, constrained=0.4, cache=True, states=(4, 40), sessions=0.4),
    "states of conversations": Shape(2, 0.0, cache=True, pages=(60, 140), states=(2, 30), sessions=0.8, requests=20),
    "states, short of pages": Shape(2, 0.2, cache=True, pages=(12, 40), states=(2, 20), priorities=True),
    "states, short of pages and calm": Shape(2, 0.2, cache=True, pages=(12, 30), states=(1, 8), requests=20, calm=True),
    "states without cache": Shape(depth=2, constrained=0.2, cache=False, sessions=0.0, states=(1, 4)),
    "drafts": Shape(depth=2, constrained=0.0, drafts=7, sessions=0.4),
    "drafts and grammars": Shape(depth=2, constrained=0.3, drafts=0),
    "drafts, blocking": Shape(depth=1, constrained=0.2, drafts=3),
    "drafts, short of pages": Shape(2, 0.1, cache=True, pages=(10, 30), priorities=True, drafts=5),
    "drafts, short of pages and calm": Shape(2, 0.1, pages=(12, 30), requests=20, calm=True, drafts=7),
    "drafts, small pages": Shape(2, 0.0, page_size=1, pages=(40, 70), drafts=7),
    "drafts and windows": Shape(2, 0.1, cache=True, pages=(30, 60), windows=(None, 9, 5), drafts=7, sessions=0.4),
    "drafts and states": Shape(depth=2, constrained=0.4, cache=True, states=(1, 12), drafts=7, sessions=0.4),
    "drafts and states, blocking": Shape(1, 0.4, cache=True, states=(4, 40), drafts=3, sessions=0.4),
    "drafts and states, short of pages": Shape(2, 0.0, cache=True, pages=(12, 40), states=(2, 20), drafts=0),
    "drafts and states, calm": Shape(2, 0.0, pages=(12, 30), states=(1, 8), drafts=5, requests=20, calm=True),
    "a draft model and states": Shape(2, 0.3, cache=True, states=(2, 20), drafts=3, draft_model=True, sessions=0.4),
    "a draft model": Shape(depth=2, constrained=0.3, cache=True, drafts=3, draft_model=True, sessions=0.4),
    "a draft model, adaptive": Shape(2, 0.0, cache=True, drafts=0, draft_model=True, sessions=0.4, requests=20),
    "a draft model, short of pages": Shape(2, 0.3, pages=(10, 30), priorities=True, drafts=0, draft_model=True),
    "drafts in static batches": Shape(depth=2, constrained=0.2, static=True, drafts=2),
}


CUT_SHORT = {FinishReason.ABORT, *ErrorCode}
CUT_SHORT -= {ErrorCode.INVALID_GRAMMAR, ErrorCode.GRAMMAR_FAILED}
"""Outcomes that the reference does not predict."""
DISTURBED = ("pauses", "overloaded", "swaps", "sleeps")
SHARING = ("hit", "evicted", "cache hits reported", "preemptions")
STATES = ("states saved", "states loaded", "states evicted")
EXPECTED = {
    "immediate": DISTURBED,
    "blocking": DISTURBED,
    "mixed": (*SHARING, *DISTURBED),
    "short of pages": (*SHARING, "for lack of pages"),
    "short of pages and calm": (*SHARING, "for lack of pages"),
    "small pages and calm": (*SHARING, "for lack of pages"),
    "windows": SHARING,
    "a draft model": ("drafted", "caught_up"),
    "a draft model, adaptive": ("drafted", "caught_up"),
    "a draft model, short of pages": ("drafted", "preemptions"),
    "windows and short of pages": (*SHARING, "for lack of pages"),
    "windows and calm": (*SHARING, "for lack of pages"),
    "windows in all layers": (*SHARING, "session hits"),
    "states": (*SHARING, *STATES),
    "states of conversations": (*SHARING, "session hits", *STATES),
    "states, blocking": (*SHARING, "states saved", "states loaded"),
    "states, short of pages": (*SHARING, "for lack of pages", *STATES),
    "states, short of pages and calm": (*SHARING, "for lack of pages", *STATES),
    "drafts and states": (*SHARING, "session hits", *STATES),
    "drafts and states, blocking": (*SHARING, "states saved", "states loaded"),
    "drafts and states, short of pages": (*SHARING, "for lack of pages", *STATES),
    "a draft model and states": (*SHARING, "states saved", "states loaded", "drafted", "caught_up"),
    "conversations": (*SHARING, "session busy", "sessions evicted", "session hits"),
}
"""Events that the traffics of a shape must contain."""


def check_tokens(world: World) -> int:
    """Check that the tokens of every request are the reference's, or a prefix of them where it was cut short."""
    refused = 0
    for request in world.requests:
        outcomes = world.mailbox.outcomes.get(request.key, [])
        if not outcomes:
            lost = request.client in world.mailbox.gone or request.client in world.forgotten
            assert request.key in world.aborted or lost, f"{request} was never answered"
            continue
        tokens, (expected, end), outcome = world.mailbox.received[request.key], request.reference(), outcomes[0]
        reason = outcome.code if isinstance(outcome, Failure) else outcome.reason
        if reason in CUT_SHORT:
            assert tokens == expected[: len(tokens)], request
            refused += reason is not FinishReason.ABORT
        else:
            assert tokens == expected, f"{request}: {tokens}, reference {expected}"
            assert reason is end, f"{request}: {outcome}, reference {end}"
        check_logprobs(world, request, tokens)
        check_logits(world, request, tokens)
    return refused


def check_logprobs(world: World, request: Request, tokens: list[int]) -> None:
    """Check the log-probabilities of every request that asked for them.

    Each token that was sent has its own, and each prompt token as well once a token was sent; never another's.
    """
    prompt = request.prompt
    found: dict[int, TokenLogprobs] = {}
    for part in world.mailbox.logprobs[request.key]:
        size = 4 * (1 + 2 * part.top)
        for offset in range(len(part.lines) // size):
            assert part.start + offset not in found
            lines = part.lines[offset * size : (offset + 1) * size]
            found[part.start + offset] = structs.replace(part, lines=lines)
    first = len(prompt)
    if request.prompt_logprobs is not None:
        first = first - request.num_verified if request.num_verified else 1
    last = len(prompt) + len(tokens) if request.logprobs is not None else len(prompt)
    if tokens:
        assert list(found) == list(range(first, last)), request
    for position, part in found.items():
        top = request.prompt_logprobs if position < len(prompt) else request.logprobs
        assert part.top == top and first <= position < last
        assert part.lines == reference_records(prompt, tokens, part.top)[position - 1], (
            f"{request}: position {position}"
        )


def check_logits(world: World, request: Request, tokens: list[int]) -> None:
    """Check that verified tokens have their logits, each once, and that no other request has any."""
    parts = world.mailbox.logits[request.key]
    if not request.num_verified or not tokens:
        assert not parts or request.num_verified, request
        return
    start = len(request.prompt) - request.num_verified
    known = [start + len(b"".join([before.rows for before in parts[:index]])) // 4 for index in range(len(parts))]
    assert [part.start for part in parts] == known, request
    assert b"".join([part.rows for part in parts]) == reference_logits(request.prompt, start), request


@pytest.mark.parametrize("name", SHAPES)
def test_random_traffic_equals_the_sequential_reference(name: str) -> None:
    launches = overlaps = jumped = verified = beside_masks = 0
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed, SHAPES[name])
        try:
            world.engine.run()
            check_tokens(world)
            world.check_after_the_end()
        except Exception as error:
            raise AssertionError(f"traffic {name}, seed {seed}: {error}") from error
        launches += world.launches
        overlaps += world.overlaps
        jumped += world.runtime.jumped
        verified += world.runtime.verified
        beside_masks += world.runtime.verified_beside_masks
        happened.update(world.happened())
        if (model := world.runtime.draft_model) is not None:
            happened.update(drafted=model.drafted, lacking=model.lacking, caught_up=model.caught_up)
    assert (jumped > 0) == (SHAPES[name].constrained > 0)
    assert (verified > 0) == (SHAPES[name].drafts is not None)
    assert happened["lacking"] <= happened["drafted"] / 20, "rows that lack positions of the draft model"
    assert beside_masks or name != "drafts and grammars"
    if SHAPES[name].depth == 2:
        assert overlaps > launches / 2, f"only {overlaps} of {launches} launches had a step in flight before them"
    else:
        assert overlaps == 0
    rare = {what for what in EXPECTED.get(name, ()) if not happened[what]}
    assert not rare, f"never happened: {rare}, of {happened}"


@pytest.mark.parametrize("place", ["launch", "sample", "collect"])
@pytest.mark.parametrize("depth", [1, 2])
def test_device_error_ends_every_stream_once(place: str, depth: int) -> None:
    fatal = 0
    for seed in range(FAULTY_SEEDS):
        world = World(seed, Shape(depth, constrained=0.2, faults=place))
        try:
            if world.runtime.fault and _runs_into_fatal(world):
                fatal += 1
                assert all(
                    isinstance(o, Finished | Failure) for outcomes in world.mailbox.outcomes.values() for o in outcomes
                )
                world.arrivals.clear()
            world.check_after_the_end()
            _check_prefixes(world)
        except Exception as error:
            raise AssertionError(f"fault in {place}, seed {seed}: {error}") from error
    assert fatal > FAULTY_SEEDS / 6


def _runs_into_fatal(world: World) -> bool:
    try:
        world.engine.run()
    except FatalError:
        return True
    return False


def _check_prefixes(world: World) -> None:
    for request in world.requests:
        tokens = world.mailbox.received.get(request.key, [])
        assert tokens == request.reference()[0][: len(tokens)], request
