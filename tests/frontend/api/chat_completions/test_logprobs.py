"""Log-probabilities of a chat, read with the official client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.engine_request import fake_logprob
from tests.fakes.tokenizer import byte_level_tokenizer, write_chat_template, write_tokenizer
from tests.frontend.conftest import DEADLINE, RunningServer
from tests.support.shared_frontend import shared_fixtures

RAW = byte_level_tokenizer()
TEXT = "one 🙃 two"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    write_chat_template(path)
    return path


shared, engine, server = shared_fixtures()


@pytest.fixture
def client(server: RunningServer, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    engine.script = lambda _: RAW.encode(TEXT).ids
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "x"}]
    return client.chat.completions.create(model="fake-model", messages=messages, **fields)


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_has_logprobs_and_bytes_of_each_token(client: openai.OpenAI, stream: bool, top: int | None) -> None:
    wanted = {} if top is None else {"top_logprobs": top}
    reply = chat(client, logprobs=True, stream=stream, **wanted)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    ids = RAW.encode(TEXT).ids
    assert b"".join(bytes(token.bytes) for token in content).decode() == TEXT
    assert [token.logprob for token in content] == [fake_logprob(at, token) for at, token in enumerate(ids, 1)]
    assert all(len(token.top_logprobs) == (top or 0) for token in content)
    assert any("\\x" in token.token for token in content), "half a character"
    if stream:
        text = ""
        for choice in choices:
            text += choice.delta.content or ""
            if choice.logprobs:
                spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
                assert spelled == choice.delta.content, "text and log-probabilities come together"
        assert text == TEXT


def test_chat_has_no_logprobs_unless_requested(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert chat(client).choices[0].logprobs is None
    assert engine.submits[0].logprobs is None


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}])
def test_invalid_top_logprobs_are_rejected_by_name(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("logprobs", [False, True])
def test_prompt_logprobs_of_a_chat_have_the_shape_of_vllm(
    client: openai.OpenAI, engine: FakeEngine, logprobs: bool
) -> None:
    reply = chat(client, logprobs=logprobs, n=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True}).to_dict()
    first, *others = reply["prompt_logprobs"]
    ids = reply["choices"][0]["prompt_token_ids"]
    assert first is None
    assert [next(iter(found)) for found in others] == [str(token) for token in ids[1:]]
    assert {submit.prompt_logprobs for submit in engine.submits} == {1}
    for choice in reply["choices"]:
        assert choice["message"]["content"] == TEXT
        assert not logprobs or len(choice["logprobs"]["content"]) == len(RAW.encode(TEXT).ids)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_tokens_are_named_by_their_ids_on_request(client: openai.OpenAI, stream: bool) -> None:
    extra = {"return_tokens_as_token_ids": True}
    reply = chat(client, logprobs=True, top_logprobs=2, stream=stream, extra_body=extra)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.token for token in content] == [f"token_id:{token}" for token in RAW.encode(TEXT).ids]
    assert all(other.token.startswith("token_id:") for token in content for other in token.top_logprobs)
    assert b"".join(bytes(token.bytes) for token in content).decode() == TEXT
