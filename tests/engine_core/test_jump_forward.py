"""Tokens that a grammar forces take no steps of their own, with one step in flight or two."""

from random import Random

import pytest
from msgspec import structs

from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import END, VOCAB, reference
from tests.support.recorded_engine import CLIENT, EPOCH, Bench


@pytest.mark.parametrize("depth", [1, 2])
def test_jump_forward_takes_fewer_steps(depth: int) -> None:
    bench = Bench(depth)
    bench.submit(1, 12, "runs 8")
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 12, frozenset(), 0, FakeConstraint("runs 8"))
    assert bench.stats.generation_tokens == 12
    assert bench.stats.steps_launched <= 4


def test_jump_forward_saves_steps_with_two_in_flight_too() -> None:
    """A step more for each run: the token before it is computed by the step in flight."""
    steps = {1: 0, 2: 0}
    for depth in steps:
        for begins in range(12):
            bench = Bench(depth)
            bench.submit(1, 55, grammar := f"runs {begins}")
            bench.finish()
            expected = reference([3, 4, 5], 55, frozenset(), 0, FakeConstraint(grammar))
            assert bench.mailbox.received[CLIENT, 1] == expected
            steps[depth] += bench.stats.steps_launched
    assert steps[1] <= 0.51 * 12 * 55
    assert steps[2] <= 0.67 * 12 * 55


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_whether_forced_ones_are_jumped_over_or_decoded(depth: int, seed: int) -> None:
    """Rows come and go, and too few pages preempt some: which jumps are worth a step changes all the time."""
    random = Random(seed)
    bench = Bench(depth, rows=20, pages=random.choice([40, 200]))
    asked = {}
    for request_id in range(1, 41):
        client, runs = random.choice([CLIENT, b"other"]), random.random() < 0.6
        params = SamplingParams(random.randint(1, 30), min_tokens=random.choice([0, 0, 1, 5]), ignore_eos=not runs)
        params = structs.replace(params, min_tokens=min(params.min_tokens, params.max_tokens))
        grammar = f"runs {random.randrange(5)}" if runs else None
        prompt = [random.randrange(2, VOCAB) for _ in range(random.randint(1, 12))]
        if not asked:
            bench.say(Hello(PROTOCOL_VERSION, EPOCH, "other"), client=b"other")
        bench.say(Submit(request_id, pack_ids(prompt), params, grammar), client=client)
        asked[client, request_id] = (prompt, params, grammar)
        for _ in range(random.randrange(4)):
            bench.engine.tick()
    bench.finish()
    for (client, request_id), (prompt, params, grammar) in asked.items():
        ends = frozenset() if params.ignore_eos else frozenset({END})
        constraint = FakeConstraint(grammar) if grammar else None
        expected = reference(prompt, params.max_tokens, ends, params.min_tokens, constraint)
        assert bench.mailbox.received[client, request_id] == expected, (request_id, params, grammar)
        # A grammar that forces the end before min_tokens allow it cannot be followed.
        outcome, stuck = bench.outcome(request_id, client), constraint is not None and constraint.problem != ""
        assert isinstance(outcome, Failure if stuck else Finished), outcome
    assert bench.scheduler.audit() == [] and bench.at_rest()
