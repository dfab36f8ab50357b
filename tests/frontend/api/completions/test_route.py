"""`POST /v1/completions` over a real socket, in front of a fake engine."""

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from tandem.protocol.codec import pack_ids, unpack_floats, unpack_ids
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import MAX_SEED
from tests.fakes.engine import END_ID, FakeEngine
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import DEADLINE, RunningServer, get, until
from tests.frontend.conftest import post as send
from tests.support.broken_stream import LONG, post_broken_stream, slow_down
from tests.support.event_stream import events
from tests.support.refusals import numbers_in
from tests.support.scrape import value
from tests.support.shared_frontend import shared_fixtures
from tests.support.stream_client import request as http_request

RAW: tokenizers.Tokenizer = byte_level_tokenizer()
TEXT = "how do I join two paths? 你好 🙂"

shared, engine, server = shared_fixtures()


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text).ids
    return ids


def say(text: str) -> Any:
    """Return a script that answers every prompt with this text."""
    return lambda submit: encode(text)[: submit.sampling.max_tokens]


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "fake-model", "prompt": TEXT, **fields}
    return send(server.url + "/v1/completions", json=body)


def test_completion_has_every_field_of_the_api(server: RunningServer) -> None:
    response = post(server, max_tokens=len(encode(TEXT)))
    assert response.status_code == 200
    reply = response.json()
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 1_700_000_000
    assert reply.pop("system_fingerprint").startswith("tandem-")
    count = len(encode(TEXT))
    assert reply == {
        "object": "text_completion",
        "model": "fake-model",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": count,
            "completion_tokens": count,
            "total_tokens": 2 * count,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_stream_chunks_add_up_to_the_whole_completion(server: RunningServer) -> None:
    response = post(server, stream=True, max_tokens=len(encode(TEXT)))
    chunks = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert set(chunks[0]) == {"id", "object", "created", "model", "system_fingerprint", "choices"}


def test_stream_usage_comes_in_its_own_chunk(server: RunningServer) -> None:
    *chunks, last = events(post(server, stream=True, max_tokens=5, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    count = len(encode(TEXT))
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert last["usage"] == {"prompt_tokens": count, "completion_tokens": 5, "total_tokens": count + 5, **details}


def test_prompt_accepts_texts_and_token_ids_and_arrays_of_both(server: RunningServer) -> None:
    ids, other = encode("one"), encode("two three")
    for prompt, prompts in (
        ("one", [ids]),
        (["one", "two three"], [ids, other]),
        (ids, [ids]),
        ([ids, other], [ids, other]),
    ):
        reply = post(server, prompt=prompt, return_token_ids=True).json()
        assert [choice["prompt_token_ids"] for choice in reply["choices"]] == prompts
        assert [choice["token_ids"] for choice in reply["choices"]] == [(p * 16)[:16] for p in prompts]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert reply["usage"]["completion_tokens"] == 16 * len(prompts)


def test_choices_of_a_prompt_share_a_seed_and_differ_by_index(server: RunningServer, engine: FakeEngine) -> None:
    reply = post(server, prompt=["one", "two"], n=3, seed=7, max_tokens=2).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [submit.sampling.choice for submit in engine.submits] == [0, 1, 2, 0, 1, 2]
    assert {submit.sampling.seed for submit in engine.submits} == {7}
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts[0] == texts[1] == texts[2] == RAW.decode((encode("one") * 2)[:2])
    assert texts[3] == texts[4] == texts[5] == RAW.decode((encode("two") * 2)[:2])
    assert reply["usage"]["prompt_tokens"] == len(encode("one")) + len(encode("two"))


def test_seed_is_drawn_at_random_by_default(server: RunningServer, engine: FakeEngine) -> None:
    post(server)
    post(server)
    first, second = (submit.sampling.seed for submit in engine.submits)
    assert first != second
    assert 0 <= min(first, second) <= max(first, second) <= MAX_SEED


def test_every_sampling_field_reaches_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    fields = {
        "max_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.75, "seed": 11, "min_tokens": 3, "ignore_eos": True,
    }  # fmt: skip
    post(server, **fields, stop_token_ids=[5, 6], logit_bias={"3": 1.5, "4": -100})
    sampling = engine.submits[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.stop_token_ids == pack_ids([5, 6])
    assert unpack_ids(sampling.logit_bias_ids) == [3, 4]
    assert unpack_floats(sampling.logit_bias_values) == [1.5, -100.0]


def test_stop_token_counts_as_usage_but_is_not_in_the_text(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = say("the end")
    reply = post(server, max_tokens=100, return_token_ids=True).json()
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the end", "stop")
    assert choice["token_ids"] == [*encode("the end"), END_ID]
    assert reply["usage"]["completion_tokens"] == len(encode("the end")) + 1


def test_stop_token_of_an_ordinary_word_is_not_in_the_text(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = say("over the ")
    engine.end_id = encode("a")[0]
    assert post(server, max_tokens=100).json()["choices"][0]["text"] == "over the "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_stop_string_across_tokens_never_leaks(
    server: RunningServer, engine: FakeEngine, stream: bool, per_step: int
) -> None:
    engine.script = say("one two three four five six seven eight nine ten")
    engine.tokens_per_step = per_step
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    response = post(server, max_tokens=100, stop=["zzz", "ee four f"], stream=stream, **fields)
    if stream:
        *chunks, last = events(response)
        texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        reply = response.json()
        texts, reason, usage = [reply["choices"][0]["text"]], reply["choices"][0]["finish_reason"], reply["usage"]
    assert "".join(texts) == "one two thr"
    assert reason == "stop"
    ids = encode("one two three four five six seven eight nine ten")
    used = next(count for count in range(len(ids)) if "ee four f" in RAW.decode(ids[:count]))
    assert usage["completion_tokens"] == used


def test_stop_string_aborts_the_sequence_at_once(server: RunningServer, engine: FakeEngine) -> None:
    response = post(server, max_tokens=1500, stop=" paths")
    assert response.json()["choices"][0]["text"] == "how do I join two"
    until(lambda: engine.aborts == [engine.submits[0].request_id], "the stop string aborts its row")
    until(lambda: engine.num_running == 0)


def test_held_back_text_is_sent_at_the_end(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = say("one two thr")
    assert post(server, max_tokens=100, stop="three").json()["choices"][0]["text"] == "one two thr"


def test_stop_string_is_ignored_before_min_tokens(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = say("stop here and stop there")
    ids = encode("stop here and stop there")
    first = next(count for count in range(len(ids)) if "stop" in RAW.decode(ids[:count]))
    text = post(server, max_tokens=100, stop="stop", min_tokens=first).json()["choices"][0]["text"]
    assert text == "stop here and "


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_ahead_of_the_text(server: RunningServer, stream: bool) -> None:
    for prompt in ("one two", encode("one two")):
        response = post(server, prompt=prompt, echo=True, max_tokens=len(encode("one two")), stream=stream, n=2)
        if stream:
            texts = ["", ""]
            for chunk in events(response):
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        else:
            texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == ["one twoone two"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_does_not_reach_the_engine(server: RunningServer, engine: FakeEngine, stream: bool) -> None:
    response = post(server, prompt="one two", echo=True, max_tokens=0, stream=stream)
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response))
    else:
        text = response.json()["choices"][0]["text"]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert text == "one two"
    assert engine.submits == []


def test_stream_returns_all_token_ids(server: RunningServer) -> None:
    chunks = events(post(server, stream=True, max_tokens=40, return_token_ids=True))
    ids = encode(TEXT)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == (ids * 40)[:40]


def test_failure_before_the_first_token_is_an_http_status(server: RunningServer, engine: FakeEngine) -> None:
    for code, status in ((ErrorCode.OVERLOADED, 429), (ErrorCode.KV_CAPACITY, 400), (ErrorCode.MODEL_FAILED, 500)):
        engine.refusal = code
        for stream in (False, True):
            response = post(server, stream=stream, n=2)
            assert response.status_code == status
            assert response.json()["error"]["code"] == code.value
            assert ("retry-after" in response.headers) == (status == 429)


def test_failure_within_a_stream_is_an_event(server: RunningServer, engine: FakeEngine) -> None:
    body = {"model": "fake-model", "prompt": TEXT, "max_tokens": LONG}
    *chunks, last = events(post_broken_stream(engine, server.url + "/v1/completions", body))
    assert chunks
    assert last["error"]["code"] == "model_failed"
    assert set(last["error"]) == {"message", "type", "param", "code"}


def test_failure_of_one_choice_aborts_the_others(server: RunningServer, engine: FakeEngine) -> None:
    engine.break_after = 5
    response = post(server, n=3, max_tokens=1000)
    assert response.status_code == 500
    until(lambda: engine.num_running == 0, "the other choices are aborted")


def test_default_max_tokens_is_lowered_to_the_remaining_context(server: RunningServer, engine: FakeEngine) -> None:
    reply = post(server, prompt=[[5] * 2040, [5] * 2000, [5] * 2047]).json()
    assert [submit.sampling.max_tokens for submit in engine.submits] == [8, 16, 1]
    assert reply["usage"]["completion_tokens"] == 25
    assert post(server, prompt="x" * 2040).status_code == 200
    for fields in ({"prompt": [5] * 2040, "max_tokens": 16}, {"prompt": [5] * 2048}, {"prompt": "x" * 2048},
                   {"prompt": [5] * 2040, "min_tokens": 9}):  # fmt: skip
        response = post(server, **fields)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_scored_prompt_needs_room_for_one_token_more(server: RunningServer, engine: FakeEngine) -> None:
    """The engine generates it, and it is discarded."""
    scored = {"max_tokens": 0, "echo": True, "logprobs": 0}
    response = post(server, prompt=[5] * 2048, **scored)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert numbers_in(error["message"]) == [2048, 2047] and not engine.submits
    assert post(server, prompt=[5] * 2047, **scored).status_code == 200
    assert post(server, prompt=[5] * 2048, max_tokens=0, echo=True).status_code == 200, "without an engine"


def test_openai_client_reads_completions_and_streams(server: RunningServer, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        reply = client.completions.create(model="fake-model", prompt=TEXT, max_tokens=len(encode(TEXT)))
        assert reply.choices[0].text == TEXT
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(encode(TEXT))
        stream = client.completions.create(
            model="fake-model",
            prompt=TEXT,
            max_tokens=len(encode(TEXT)),
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage is not None
        assert [model.id for model in client.models.list()] == ["fake-model"]
        assert client.models.retrieve("fake-model").id == "fake-model"
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="x")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        slow_down(engine)
        stream = client.completions.create(model="fake-model", prompt=TEXT, max_tokens=LONG, stream=True)
        next(stream)
        engine.break_after = 1
        with pytest.raises(openai.APIError, match="broken"):
            list(stream)


def test_concurrent_clients_get_their_own_completions(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        prompt = f"client {number} of many"
        if number % 2:
            reply = await client.completions.create(model="fake-model", prompt=prompt, max_tokens=len(encode(prompt)))
            return reply.choices[0].text
        chunks = await client.completions.create(
            model="fake-model", prompt=prompt, max_tokens=len(encode(prompt)), stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(all_of_them()) == [f"client {number} of many" for number in range(32)]


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_its_sequences(server: RunningServer, engine: FakeEngine, stream: bool) -> None:
    disconnects = 'tandem_frontend_aborts_total{reason="disconnect"}'
    before = value(get(server.url + "/metrics").text, disconnects)
    engine.hold = not stream
    body = {"model": "fake-model", "prompt": TEXT, "max_tokens": 1500, "n": 2, "stream": stream}
    with httpx.Client(timeout=DEADLINE) as client:
        if stream:
            with client.stream("POST", server.url + "/v1/completions", json=body) as response:
                next(response.iter_raw())
        else:
            with socket.create_connection(server.sock.getsockname()) as leaving:
                leaving.sendall(http_request(json.dumps(body).encode()))
                until(lambda: engine.num_running == 2, "both rows wait")
    until(lambda: len(engine.aborts) == 2, "both rows are aborted")
    assert sorted(engine.aborts) == sorted(submit.request_id for submit in engine.submits)
    until(lambda: engine.num_running == 0)
    metrics = get(server.url + "/metrics").text
    assert value(metrics, disconnects) == before + 2
    assert "tandem_frontend_num_requests_running 0.0" in metrics
