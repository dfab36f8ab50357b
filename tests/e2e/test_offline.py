"""Offline inference with the default model, compared with a server of the same model."""

from collections.abc import Iterator

import openai
import psutil
import pytest

from tandem.frontend.offline.llm import LLM
from tests.e2e.test_serving import MODEL, QUESTIONS, ask


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
