"""Offline inference with the default model, compared with a server of the same model."""

from collections.abc import Iterator

import openai
import psutil
import pytest

from tandem.frontend.offline.llm import LLM
from tests.e2e.default_model.test_serving import MODEL, QUESTIONS, ask

ROUNDING = 1e-4
"""Largest difference of log-probabilities: steps of other sizes sum in another order."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as running:
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


def test_offline_streams_equal_the_whole_answers(llm: LLM) -> None:
    talk = [{"role": "user", "content": QUESTIONS[1]}]
    assert (
        "".join(piece.text for piece in llm.stream_chat(talk, temperature=0)) == llm.chat(talk, temperature=0)[0].text
    )


def test_an_llm_that_is_closed_while_it_generates_leaves_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """The engine is told to stop right behind the Goodbye, and output for the stream can no longer be sent."""
    with LLM(log_level="warning") as own:
        stream = iter(own.stream("def", max_tokens=1000, ignore_eos=True))
        assert next(stream).token_ids
    assert "WARNING" not in capfd.readouterr().err
