"""Log-probabilities and `best_of` over a real socket, read with the official client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tandem.frontend.generation.scored_tokens import LOWEST
from tandem.protocol.codec import unpack_ids
from tandem.protocol.commands import Submit
from tests.fakes.engine import FakeEngine
from tests.fakes.engine_request import fake_logprob
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import DEADLINE, RunningServer, post
from tests.support.refusals import numbers_in
from tests.support.shared_frontend import shared_fixtures

RAW = byte_level_tokenizer()
PROMPT, TEXT = "stop and ", "one 你好 🙂 two"

shared, engine, server = shared_fixtures()


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


FIRST, COUNT = len(encode(PROMPT)), len(encode(TEXT))


def logprobs_of(text: str, first: int) -> list[float]:
    return [fake_logprob(at, token) for at, token in enumerate(encode(text), first)]


@pytest.fixture
def client(server: RunningServer, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    engine.script = lambda submit: encode(TEXT)[: submit.sampling.max_tokens]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=DEADLINE) as made:
        yield made


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "fake-model", "prompt": PROMPT, "max_tokens": COUNT, **fields}
    return client.completions.create(**asked)


def test_completion_has_logprobs_of_every_token(client: openai.OpenAI, engine: FakeEngine) -> None:
    (choice,) = complete(client, logprobs=2).choices
    found = choice.logprobs
    assert choice.text == TEXT
    assert found.token_logprobs == logprobs_of(TEXT, FIRST)
    assert found.text_offset[0] == len(PROMPT)
    assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == COUNT
    assert "".join(found.tokens[:2]) == "one"
    assert sorted(found.top_logprobs[0].values()) == [LOWEST, LOWEST, found.token_logprobs[0]]
    (submit,) = engine.submits
    assert (submit.logprobs, submit.prompt_logprobs) == (2, None)


def test_completion_has_no_logprobs_unless_requested(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert complete(client).choices[0].logprobs is None
    (submit,) = engine.submits
    assert (submit.logprobs, submit.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("prompt", [PROMPT, encode(PROMPT)])
@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompt_has_logprobs(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    reply = complete(client, prompt=prompt, logprobs=1, echo=True, n=2, stream=stream)
    for index in range(2):
        parts = [choice for chunk in reply if (choice := chunk.choices[0]).index == index] if stream else []
        parts = parts or [reply.choices[index]]
        values = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
        offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
        top = [entry for part in parts if part.logprobs for entry in part.logprobs.top_logprobs]
        assert "".join(part.text for part in parts) == PROMPT + TEXT
        assert values == [None, *logprobs_of(PROMPT, 0)[1:], *logprobs_of(TEXT, FIRST)]
        assert offsets == sorted(offsets)
        assert offsets[0] == 0 and offsets[FIRST] == len(PROMPT)
        assert top[0] is None and all(top[1:])
        if stream:
            break


def test_stream_sends_logprobs_with_their_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.tokens_per_step = 2
    offset = len(PROMPT)
    values = []
    for chunk in complete(client, logprobs=0, stream=True):
        (choice,) = chunk.choices
        if choice.logprobs:
            values += choice.logprobs.token_logprobs
            assert all(offset <= at <= offset + len(choice.text) for at in choice.logprobs.text_offset)
        else:
            assert not choice.text
        offset += len(choice.text)
    assert values == logprobs_of(TEXT, FIRST)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_exclude_tokens_cut_off_by_a_stop_string(client: openai.OpenAI, stream: bool) -> None:
    reply = complete(client, logprobs=0, stop=["好"], stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    text = "".join(choice.text for choice in choices)
    assert text == "one 你"
    spelled = [_bytes(token) for token in tokens]
    assert b"".join(spelled).startswith(text.encode())
    assert len(b"".join(spelled[:-1])) < len(text.encode()), "a token of which nothing was shown"


def _bytes(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes([int(part, 16) for part in token.removeprefix("bytes:\\x").split("\\x")])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_scores_the_prompt(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    reply = complete(client, logprobs=3, echo=True, max_tokens=0, stop="x", stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == PROMPT
    assert choices[-1].finish_reason == "length"
    found = choices[-1].logprobs
    assert found.token_logprobs == [None, *logprobs_of(PROMPT, 0)[1:]]
    if not stream:
        assert reply.usage.completion_tokens == 0
    (submit,) = engine.submits
    assert (submit.logprobs, submit.prompt_logprobs) == (None, 3)
    assert submit.sampling.max_tokens == 1 and submit.sampling.ignore_eos


def by_choice(submit: Submit) -> list[int]:
    """Script a longer text for a later choice.

    The fake engine's log-probabilities fall with the position up to a multiple of 5.
    """
    return encode("abcdefgh")[: submit.sampling.choice + 1]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_returns_the_choices_with_the_highest_mean_logprob(
    client: openai.OpenAI, engine: FakeEngine, logprobs: int | None
) -> None:
    engine.script = by_choice
    reply = complete(client, prompt=[PROMPT, "x"], n=2, best_of=4, logprobs=logprobs, max_tokens=8)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for number, prompt in enumerate((PROMPT, "x")):
        first = len(encode(prompt))
        means = {}
        for index in range(4):
            tokens = [*encode("abcdefgh")[: index + 1], engine.end_id]
            values = [fake_logprob(at, token) for at, token in enumerate(tokens, first)]
            means["abcdefgh"[: index + 1]] = sum(values) / len(values)
        best = sorted(means, key=lambda text: -means[text])[:2]
        assert [choice.text for choice in reply.choices[2 * number : 2 * number + 2]] == best
    assert all((choice.logprobs is None) == (logprobs is None) for choice in reply.choices)
    assert reply.usage.completion_tokens == 2 * (2 + 3 + 4 + 5)
    assert len(engine.submits) == 8
    assert {submit.logprobs for submit in engine.submits} == {logprobs or 0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
def test_invalid_logprobs_and_best_of_are_rejected_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = post(server.url + "/v1/completions", json={"model": "fake-model", "prompt": PROMPT, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_infinite_logprobs_are_clamped_in_json(server: RunningServer, engine: FakeEngine) -> None:
    body = {"model": "fake-model", "prompt": PROMPT, "max_tokens": 3, "logprobs": 5, "echo": True}
    text = post(server.url + "/v1/completions", json=body).text
    assert str(LOWEST) in text

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in a reply")

    json.loads(text, parse_constant=refuse)
    assert [unpack_ids(submit.prompt_ids) for submit in engine.submits] == [encode(PROMPT)]


def test_too_many_prompt_logprobs_are_rejected_with_the_numbers(server: RunningServer, engine: FakeEngine) -> None:
    prompt = [5] * 400
    body = {"model": "fake-model", "prompt": prompt, "max_tokens": 1, "logprobs": 20, "echo": True, "n": 128}
    response = post(server.url + "/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "logprobs"
    assert numbers_in(error["message"])[:4] == [1075200, 400, 128, 21]
    assert not engine.submits


def test_logprobs_of_a_long_prompt_are_encoded_outside_the_event_loop(client: openai.OpenAI) -> None:
    (choice,) = complete(client, prompt=[5] * 2000, logprobs=0, echo=True, max_tokens=COUNT, n=1, best_of=2).choices
    assert len(choice.logprobs.tokens) == 2000 + COUNT


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_prompt_logprobs_have_the_shape_of_vllm(
    server: RunningServer, engine: FakeEngine, echo: bool, logprobs: int | None
) -> None:
    engine.script = lambda _: encode(TEXT)
    fields = {"prompt_logprobs": 2, "echo": echo, "logprobs": logprobs, "n": 2, "max_tokens": COUNT}
    body = {"model": "fake-model", "prompt": PROMPT, **fields}
    choices = post(server.url + "/v1/completions", json=body).json()["choices"]
    assert {(submit.logprobs, submit.prompt_logprobs) for submit in engine.submits} == {(logprobs or 0, 2)}
    for choice in choices:
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == FIRST - 1
        for found, token, value in zip(others, encode(PROMPT)[1:], logprobs_of(PROMPT, 0)[1:], strict=True):
            assert next(iter(found)) == str(token)
            assert found[str(token)]["logprob"] == value
            assert found[str(token)]["decoded_token"].encode() in (RAW.decode([token]).encode(), "\ufffd".encode())
            assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in found.values())
            assert {1, 2} <= {entry["rank"] for entry in found.values()}
        assert choice["text"] == (PROMPT if echo else "") + TEXT
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            expected = [*([None, *logprobs_of(PROMPT, 0)[1:]] if echo else []), *logprobs_of(TEXT, FIRST)]
            assert choice["logprobs"]["token_logprobs"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_by_their_ids_on_request(client: openai.OpenAI, stream: bool) -> None:
    reply = complete(client, logprobs=2, stream=stream, extra_body={"return_tokens_as_token_ids": True})
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    names = [f"token_id:{token}" for token in encode(TEXT)]
    assert [name for part in parts for name in part.tokens] == names
    tops = [top for part in parts for top in part.top_logprobs]
    assert all(
        name in top and all(key.startswith("token_id:") for key in top) for name, top in zip(names, tops, strict=True)
    )
