"""Offline inference with the default model, compared with a server of the same model."""

from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import torch
from torch import Tensor

from tandem import engine_core
from tandem.engine_core.models.registry import Model
from tandem.frontend.offline.llm import LLM, RequestError
from tests.e2e.default_model.test_serving import MODEL, QUESTIONS, ask
from tests.support.lora_folder import write_adapter
from tests.support.paged_model import PagedRun, load
from tests.support.refusals import numbers_in

ROUNDING = 1e-4
"""Largest difference of log-probabilities: steps of other sizes sum in another order."""


SHIPPED = Path(engine_core.__file__).parent / "default_model"
PAGE = 16


def plain_logits(model: Model, ids: list[int]) -> Tensor:
    """Return the logits of all positions, [T, vocab], computed in one step."""
    return PagedRun(model, [torch.tensor(ids)], 16, seed=1).step([(0, 0, len(ids))])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), SHIPPED, size=0.6)
    with LLM(enable_lora=True, lora_modules={"french": adapter}) as running:
        yield running
        pid = running.engine_pid
    assert pid is not None and not psutil.pid_exists(pid)


def test_offline_completions_equal_those_of_the_server(llm: LLM, client: openai.OpenAI) -> None:
    results = llm.generate(QUESTIONS * 2, max_tokens=96, temperature=0)
    assert [result.text for result in results] == [ask(client, question) for question in QUESTIONS] * 2
    assert {result.outputs[0].finish_reason for result in results} == {"stop"}


def test_offline_chats_equal_those_of_the_server(llm: LLM, client: openai.OpenAI) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    replies = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0).choices[0]  # type: ignore[call-overload]
        for messages in conversations
    ]
    results = llm.chat(conversations, temperature=0)
    assert [result.text for result in results] == [reply.message.content for reply in replies]
    assert [result.outputs[0].finish_reason for result in results] == [reply.finish_reason for reply in replies]
    assert llm.chat(conversations[0], temperature=0)[0].text == results[0].text


def test_offline_scores_and_choices_equal_those_of_the_server(llm: LLM, client: openai.OpenAI) -> None:
    options = {"max_tokens": 8, "temperature": 0.8, "seed": 7, "logprobs": 2, "n": 2, "best_of": 4}
    response = client.completions.create(model=MODEL, prompt=QUESTIONS[0], **options)  # type: ignore[call-overload]
    [result] = llm.generate(QUESTIONS[0], **options)
    assert [output.text for output in result.outputs] == [choice.text for choice in response.choices]
    for output, choice in zip(result.outputs, response.choices, strict=True):
        shown = zip(output.token_ids, output.logprobs or [], strict=False)
        values = [found[token].logprob for token, found in shown]
        assert values == pytest.approx(choice.logprobs.token_logprobs, abs=ROUNDING)
    echoed = client.completions.create(
        model=MODEL, prompt=QUESTIONS[0], max_tokens=0, echo=True, logprobs=0
    ).choices[0].logprobs  # fmt: skip
    [scored] = llm.generate(QUESTIONS[0], max_tokens=0, prompt_logprobs=0)
    assert echoed is not None and scored.prompt_logprobs is not None
    pairs = zip(scored.prompt_token_ids[1:], scored.prompt_logprobs[1:], strict=True)
    values = [found[token].logprob for token, found in pairs if found]
    assert values == pytest.approx((echoed.token_logprobs or [])[1:], abs=ROUNDING)


def test_verified_continuations_equal_a_plain_forward_pass(llm: LLM) -> None:
    model, count = load(SHIPPED), 40
    prompts = [f"{' '.join(QUESTIONS)} {QUESTIONS[number % 2]} Number {number % 4}." for number in range(count)]
    continuations = [f" The answer is {number}, of course." for number in range(count)]
    results = llm.verify(prompts, continuations, logprobs=3)
    assert [result.error for result in results] == [None] * count
    for result in results[:8]:
        expected = plain_logits(model, result.prompt_token_ids + result.token_ids).log_softmax(-1)
        scores = expected[len(result.prompt_token_ids) - 1 :]
        for row, token, found in zip(scores, result.token_ids, result.logprobs, strict=False):
            assert found[token].logprob == pytest.approx(row[token].item(), abs=ROUNDING)
            ranks = sorted([one.rank or 0 for one in found.values()])
            assert ranks[:3] == [1, 2, 3] and all(rank > 3 for rank in ranks[3:])
            best = [other for other, one in found.items() if one.rank == 1]
            assert best == [int(row.argmax())]
    again = llm.verify(prompts, continuations)
    for before, result in zip(results, again, strict=True):
        assert result.cumulative_logprob == pytest.approx(before.cumulative_logprob, abs=ROUNDING * 40)
        assert result.token_ids == before.token_ids
    cached = [result.usage.prompt_tokens_details.cached_tokens for result in again]
    assert cached == [(len(result.prompt_token_ids) - 1) // PAGE * PAGE for result in again]
    assert min(cached) >= PAGE


def test_verification_returns_logits_on_request(llm: LLM) -> None:
    [without] = llm.verify("The sky is", " blue and")
    assert without.logits is None
    model = load(SHIPPED)
    for result in llm.verify(["The sky is", [5, 6, 7]], [" blue and", [8] * 64], logits=True):
        ids = result.prompt_token_ids + result.token_ids
        expected = plain_logits(model, ids)[len(result.prompt_token_ids) - 1 :]
        assert result.logits is not None
        assert result.logits.shape == tuple(expected.shape) == (1 + len(result.token_ids), 4096)
        assert torch.allclose(
            torch.frombuffer(result.logits, dtype=torch.float32).view(expected.shape), expected, atol=1e-3
        )


def test_a_continuation_is_verified_up_to_one_token_less_than_the_context(llm: LLM) -> None:
    fits, exact, longer = llm.verify([[5] * 1983, [5] * 1984, [5] * 1985], [[6] * 64] * 3)
    assert fits.error is None and len(fits.logprobs) == 64
    for refused, count in ((exact, 2048), (longer, 2049)):
        assert refused.error is not None and refused.error.code == "context_length_exceeded"
        assert "max_tokens" not in refused.error.message and count in numbers_in(refused.error.message)


def test_each_continuation_is_refused_on_its_own(llm: LLM) -> None:
    results = llm.verify([[5], [5], [5], [], [2**30], [5], [5]], [[6], [], [6] * 65, [6], [6], [6] * 64, [-1]])
    assert [result.error is None for result in results] == [True, False, False, False, False, True, False]
    assert [numbers_in(result.error.message) for result in results if result.error][:2] == [[0, 1, 64], [65, 1, 64]]
    assert [(result.error.index, result.error.param) for result in results if result.error] == [
        (1, "continuation"),
        (2, "continuation"),
        (3, "prompt"),
        (4, "prompt"),
        (6, "continuation"),
    ]
    for failed in results[1:5]:
        with pytest.raises(RequestError):
            _ = failed.cumulative_logprob
    with pytest.raises(RequestError):
        llm.verify([[5], [5]], [[6], []], raise_on_error=True)
    assert llm.verify([], []) == []


def test_offline_streams_equal_the_whole_answers(llm: LLM) -> None:
    talk = [{"role": "user", "content": QUESTIONS[1]}]
    assert (
        "".join(piece.text for piece in llm.stream_chat(talk, temperature=0)) == llm.chat(talk, temperature=0)[0].text
    )


def test_lora_of_a_call_names_an_adapter(llm: LLM) -> None:
    given = {"max_tokens": 8, "temperature": 0, "progress": False}
    base, french = (llm.generate(QUESTIONS[0], **given, **names)[0] for names in ({}, {"lora": "french"}))
    assert base.text != french.text
    assert llm.generate(QUESTIONS[0], **given, lora="nothing")[0].error is not None


def test_an_llm_that_is_closed_while_it_generates_leaves_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """The engine is told to stop right behind the Goodbye, and output for the stream can no longer be sent."""
    with LLM(log_level="warning") as own:
        stream = iter(own.stream("def", max_tokens=1000, ignore_eos=True))
        assert next(stream).token_ids
    assert "WARNING" not in capfd.readouterr().err
