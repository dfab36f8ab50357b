"""Steps for which the device has too little memory: tried again, then without their newest prompts."""

from typing import Any

import pytest
import torch

from tandem.engine_core.errors import DeviceMemoryError, FatalError
from tandem.engine_core.models.decoder import Decoder
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.fakes.model import reference
from tests.support.recorded_engine import CLIENT, Bench
from tests.support.tiny_llama import Shape, TinyEngine, random_model


def submit(bench: Bench, request_id: int, prompt: range, max_tokens: int = 6, **wanted: Any) -> None:
    bench.say(Submit(request_id, pack_ids(prompt), SamplingParams(max_tokens, ignore_eos=True), **wanted))


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_newest_prompt_of_the_step_fails(depth: int, logprobs: int | None) -> None:
    """Streams go on, older prompts are computed, and the row and pages of the failed one come back."""
    bench = Bench(depth)
    submit(bench, 1, range(3, 6), 20, logprobs=logprobs)
    bench.engine.tick()
    for request_id in (2, 3):
        submit(
            bench, request_id, range(10 * request_id, 10 * request_id + 9), session="talk" if request_id == 3 else ""
        )
    bench.runtime.faults["launch 2"] = DeviceMemoryError("no room")
    bench.finish()
    outcome = bench.outcome(3)
    assert isinstance(outcome, Failure)
    assert outcome.code is ErrorCode.OVERLOADED
    assert "19 positions" in outcome.message and "--max-step-tokens" in outcome.message
    assert bench.mailbox.received[CLIENT, 3] == []
    for request_id, prompt, count in ((1, range(3, 6), 20), (2, range(20, 29), 6)):
        assert bench.outcome(request_id) == Finished(request_id, FinishReason.LENGTH)
        assert bench.mailbox.received[CLIENT, request_id] == reference(list(prompt), count, frozenset())
    assert bench.runtime.calls.count("launch 2") == 2
    assert bench.scheduler.audit() == []
    submit(bench, 4, range(30, 39))
    bench.finish()
    assert bench.mailbox.received[CLIENT, 4] == reference(list(range(30, 39)), 6, frozenset())


def test_prompts_fail_one_after_the_other_until_the_step_fits() -> None:
    bench = Bench(2)
    launch = bench.runtime.launch

    def small(slot: int, plan: Any) -> None:
        if plan.total_tokens > 20:
            raise DeviceMemoryError("no room")
        launch(slot, plan)

    bench.runtime.launch = small  # type: ignore[method-assign]
    for request_id in range(1, 5):
        submit(bench, request_id, range(9 * request_id - 6, 9 * request_id + 3))
    bench.finish()
    assert [isinstance(bench.outcome(number), Failure) for number in range(1, 5)] == [False, False, True, True]
    assert bench.stats.requests_failed == {"overloaded": 2}
    assert bench.at_rest()
    assert bench.scheduler.audit() == []


def test_a_step_without_prompts_that_does_not_fit_is_fatal() -> None:
    bench = Bench(1)
    submit(bench, 1, range(3, 6))
    bench.runtime.faults["launch 2"] = DeviceMemoryError("no room")
    with pytest.raises(FatalError, match="no room"):
        bench.engine.run()
    outcome = bench.outcome(1)
    assert isinstance(outcome, Failure)
    assert outcome.code is ErrorCode.ENGINE_FAILED


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model()


PROMPTS = [list(range(3, 20)), [20, 21], list(range(30, 42))]
PARAMS = [
    SamplingParams(10, temperature=0.0, ignore_eos=True),
    SamplingParams(10, seed=3, top_k=9, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(10, seed=4, ignore_eos=True),
]


class FailingModel:
    """A model whose forward pass runs out of memory, after it has written KV, in the calls with these numbers."""

    def __init__(self, model: Decoder, at: list[int]) -> None:
        self.model, self.at, self.calls = model, at, 0
        self.logits = model.logits

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        hidden = self.model.forward(*arguments)
        if self.calls in self.at:
            raise torch.OutOfMemoryError("no room")
        return hidden


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fits_after_all_changes_no_token(model: Decoder, depth: int) -> None:
    """Decode steps and steps with prompts, with a step in flight before them."""
    expected = TinyEngine(model, Shape(depth)).generate(PROMPTS, PARAMS)
    engine = TinyEngine(model, Shape(depth))
    released = []
    engine.runtime.device.release_unused = lambda: released.append(1)  # type: ignore[method-assign]
    engine.runtime.model = FailingModel(model, [1, 4, 8])  # type: ignore[assignment]
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert len(released) == 3


def test_a_step_that_never_fits_leaves_its_slot_free(model: Decoder) -> None:
    engine = TinyEngine(model, Shape(1))
    engine.generate(PROMPTS[:1], PARAMS[:1])
    plan = engine.runtime.plans[0]
    engine.runtime.model = FailingModel(model, [1, 2])  # type: ignore[assignment]
    with pytest.raises(DeviceMemoryError, match=r"\b17\b"):
        engine.runtime.launch(0, plan)
    engine.runtime.launch(0, plan)
    engine.runtime.sample(0, None)
    assert engine.runtime.collect(0) == engine.runtime.results[0]
