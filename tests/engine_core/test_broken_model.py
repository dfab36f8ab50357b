"""Requests for which the model computes NaN: they fail, and their KV is not shared."""

from collections.abc import Sequence

import pytest
import torch

from tandem.engine_core.models.decoder import Decoder
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, Bench
from tests.support.refusals import numbers_in
from tests.support.tiny_llama import CLIENT as TINY_CLIENT
from tests.support.tiny_llama import VOCAB, Shape, TinyEngine, random_model


@pytest.mark.parametrize("grammar", [None, "parity"])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_row_without_logits_fails(depth: int, after: int, grammar: str | None) -> None:
    """Its row in the step after is in flight already; that result is dropped."""
    bench = Bench(depth)
    bench.runtime.breaks = lambda row: row.row == 1 and row.end >= 3 + after
    bench.submit(1, 9, grammar)
    bench.submit(2, 9, "parity")
    bench.submit(3, 9)
    bench.finish()
    outcome = bench.outcome(1)
    assert isinstance(outcome, Failure)
    assert outcome.code is ErrorCode.MODEL_FAILED
    assert numbers_in(outcome.message)[:1] == [after]
    sound = reference([3, 4, 5], 9, frozenset(), 0, FakeConstraint(grammar) if grammar else None)
    assert bench.mailbox.received[CLIENT, 1] == sound[:after]
    for request_id, constraint in ((2, FakeConstraint("parity")), (3, None)):
        assert bench.mailbox.received[CLIENT, request_id] == reference([3, 4, 5], 9, frozenset(), 0, constraint)
    assert bench.stats.requests_failed == {"model_failed": 1}
    assert bench.stats.generation_tokens == after + 18
    assert bench.at_rest()
    assert bench.scheduler.audit() == []


@pytest.mark.parametrize("depth", [1, 2])
def test_log_probabilities_of_a_failed_row_are_dropped(depth: int) -> None:
    bench = Bench(depth)
    bench.runtime.breaks = lambda row: row.row == 1 and row.end == 5
    for request_id in (1, 2):
        params = SamplingParams(4, ignore_eos=True)
        bench.say(Submit(request_id, pack_ids([3, 4, 5]), params, logprobs=2))
    bench.finish()
    assert isinstance(bench.outcome(1), Failure)
    starts = {key: [part.start for part in parts] for key, parts in bench.mailbox.logprobs.items()}
    assert starts == {(CLIENT, 1): [3, 4], (CLIENT, 2): [3, 4, 5, 6]}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("session", ["", "talk"])
def test_pages_of_a_failed_row_leave_the_prefix_cache(session: str, depth: int) -> None:
    """They may hold NaN, which would reach every later request with that prefix."""
    bench = Bench(depth)
    prompt = pack_ids(range(10, 20))
    bench.runtime.breaks = lambda row: row.seq_id == 2 and row.end >= 12
    for request_id in (1, 2, 3):
        bench.say(Submit(request_id, prompt, SamplingParams(6, ignore_eos=True), session=session))
        bench.finish()
        bench.engine.tick()
    assert bench.mailbox.cached == {(CLIENT, 1): 0, (CLIENT, 2): 8, (CLIENT, 3): 0}
    assert isinstance(bench.outcome(2), Failure)
    assert bench.mailbox.received[CLIENT, 3] == bench.mailbox.received[CLIENT, 1]
    assert bench.scheduler.audit() == []


def test_pages_that_another_row_reads_stay_until_it_leaves() -> None:
    bench = Bench(2)
    prompt = pack_ids(range(10, 20))
    bench.runtime.breaks = lambda row: row.seq_id == 2 and row.end >= 12
    for request_id, max_tokens in ((1, 20), (2, 6)):
        bench.say(Submit(request_id, prompt, SamplingParams(max_tokens, ignore_eos=True)))
    bench.finish()
    assert isinstance(bench.outcome(2), Failure)
    assert bench.mailbox.received[CLIENT, 1] == reference(range(10, 20), 20, frozenset())
    assert bench.scheduler.audit() == []


POISON = VOCAB - 1
"""Token whose embedding is NaN in the model of the tests below."""


@pytest.fixture(scope="module")
def poisoned() -> Decoder:
    model = random_model()
    (embedding,) = [slot.target for slot in model.weight_slots() if slot.name == "model.embed_tokens.weight"]
    embedding[POISON] = torch.nan
    return model


def generate(
    engine: TinyEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], constrained: int
) -> list[list[int]]:
    """Run all requests at once, of which some may fail; return the tokens of each."""
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        grammar = "parity" if index == constrained else None
        engine.mailbox.inbox.append((TINY_CLIENT, Submit(index, pack_ids(prompt), wanted, grammar)))
    while len(engine.mailbox.outcomes) < len(prompts) or engine.engine.pipeline.in_flight:
        engine.engine.tick()
    return [engine.mailbox.received[TINY_CLIENT, index] for index in range(len(prompts))]


def forced(token: int, max_tokens: int) -> SamplingParams:
    """Return parameters under which nothing but this token is sampled."""
    return SamplingParams(
        max_tokens, temperature=0.0, logit_bias_ids=pack_ids([token]), logit_bias_values=pack_floats([1e4])
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_of_nan_weights_fails_the_requests_that_hold_it(poisoned: Decoder, depth: int) -> None:
    """In a prompt it fails the request at once, as a sampled token one step later, whatever the request asks for."""
    sound = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
    asked = [
        SamplingParams(12, temperature=0.0, ignore_eos=True),
        SamplingParams(12, seed=5, top_k=5, top_p=0.9, ignore_eos=True),
        SamplingParams(12, seed=7, repetition_penalty=1.4, ignore_eos=True),
    ]
    alone = generate(TinyEngine(poisoned, Shape(depth, max_rows=8)), sound, asked, 2)
    broken = [[12, POISON], [POISON, 13, 14], [15, POISON, 16], [17, 18]]
    wanted = [SamplingParams(5, temperature=0.0), SamplingParams(5, top_k=3), SamplingParams(5), forced(POISON, 5)]
    engine = TinyEngine(poisoned, Shape(depth, max_rows=8))
    found = generate(engine, [*sound, *broken], [*asked, *wanted], 2)
    assert found == [*alone, [], [], [], [POISON]]
    for index in range(7):
        (outcome,) = engine.mailbox.outcomes[TINY_CLIENT, index]
        if index < 3:
            assert isinstance(outcome, Finished), outcome
        else:
            assert isinstance(outcome, Failure)
            assert outcome.code is ErrorCode.MODEL_FAILED
    assert engine.engine.stats.requests_failed == {"model_failed": 4}
    assert engine.scheduler.memory.usage.in_use == 0
    assert engine.scheduler.audit() == []
    assert int(engine.runtime.tables.tokens.min()) >= 0, "a token that no embedding has is left in the table"


def test_pages_that_held_nan_serve_the_next_requests(poisoned: Decoder) -> None:
    """Both those freed with NaN in them, and a prefix that a failed request shared."""
    prompt = list(range(20, 33))
    params = [SamplingParams(10, temperature=0.0, ignore_eos=True)]
    (expected,) = generate(TinyEngine(poisoned, Shape(max_rows=1)), [prompt], params, -1)
    engine = TinyEngine(poisoned, Shape(max_rows=1))
    (tokens,) = generate(engine, [[*prompt, POISON, 5, 6]], params, -1)
    assert tokens == []
    engine.mailbox.outcomes.clear()
    assert generate(engine, [prompt], params, -1) == [expected]
