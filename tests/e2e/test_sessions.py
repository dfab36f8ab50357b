"""Sessions, cached tokens and the scheduler of a real server, through the official client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tandem.frontend.cli.main import main
from tests.support.serving import GUARD_SECONDS, Serving, until

MODEL = "tandem-default"
TURNS = ("What does textwrap.dedent do?", "What does os.path.join do?", "What does math.gcd do?")


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def turn(client: openai.OpenAI, messages: list[ChatCompletionMessageParam], **more: Any) -> ChatCompletion:
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=64, extra_body=more
    )
    assert isinstance(reply, ChatCompletion)
    return reply


def cached(reply: ChatCompletion) -> int:
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def inspected(client: openai.OpenAI) -> dict[str, Any]:
    root = str(client.base_url).removesuffix("v1/")
    return client.get(root + "admin/scheduler", cast_to=dict[str, Any])


def session_of(client: openai.OpenAI, name: str) -> dict[str, Any] | None:
    found = [session for session in inspected(client)["sessions"] if session["session_id"] == name]
    return found[0] if found else None


def end(client: openai.OpenAI, name: str) -> dict[str, Any]:
    return client.delete(f"/sessions/{name}", cast_to=dict[str, Any])


def test_a_session_reuses_the_kv_of_three_turns(
    client: openai.OpenAI, serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[ChatCompletionMessageParam] = []
    counts: list[int] = []
    for question in TURNS:
        messages.append(user(question))
        alone = turn(client, messages, cache_salt=f"alone {len(messages)}")
        reply = turn(client, messages, session_id="three turns", cache_salt="together")
        assert cached(alone) == 0, "this salt was not used before"
        assert reply.choices[0].message.content == alone.choices[0].message.content
        assert reply.usage is not None
        assert cached(reply) < reply.usage.prompt_tokens
        counts.append(cached(reply))
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert counts[0] == 0 < counts[1] < counts[2]
    session = until(lambda: session_of(client, "three turns"), "the session to be seen")
    assert not session["busy"]
    assert session["pages"] > 0
    assert main(["inspect", "--url", serving.url]) == 0
    table = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["three", "turns", "no", str(session["pages"])] in table
    assert end(client, "three turns") == {"id": "three turns", "object": "session", "deleted": True}
    assert session_of(client, "three turns") is None
    with pytest.raises(openai.NotFoundError) as caught:
        end(client, "three turns")
    assert caught.value.code == "session_not_found"


def test_a_second_request_on_a_busy_session_is_409(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=TURNS[0] * 8, max_tokens=1800, stream=True,
        extra_body={"ignore_eos": True, "session_id": "busy", "priority": 5},
    )  # fmt: skip
    next(iter(stream))
    with pytest.raises(openai.ConflictError) as caught:
        turn(client, [user(TURNS[0])], session_id="busy")
    assert (caught.value.code, caught.value.param) == ("session_busy", "session_id")
    assert caught.value.response.headers["retry-after"] == "1"
    session = session_of(client, "busy")
    assert session is not None
    assert session["busy"]
    rows = [one for one in inspected(client)["sequences"] if one["session_id"] == "busy"]
    assert [(one["priority"], one["state"]) for one in rows] == [(5, "decode")]
    stream.close()

    def idle() -> bool:
        session = session_of(client, "busy")
        return session is not None and not session["busy"]

    until(idle, "the turn to end")
    end(client, "busy")


def test_a_busy_session_is_deleted_after_its_turn(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Tell me", max_tokens=1800, stream=True,
        extra_body={"ignore_eos": True, "session_id": "ending"},
    )  # fmt: skip
    next(iter(stream))
    assert end(client, "ending") == end(client, "ending"), "until then it is there"
    with pytest.raises(openai.ConflictError):
        turn(client, [user(TURNS[0])], session_id="ending")
    stream.close()
    until(lambda: session_of(client, "ending") is None, "the session to end with its turn")


def test_requests_of_different_salts_share_no_kv(client: openai.OpenAI) -> None:
    messages = [user("Tell me about heapq.heappush, " * 8)]
    assert cached(turn(client, messages, cache_salt="one")) == 0
    assert cached(turn(client, messages, cache_salt="one")) > 0
    assert cached(turn(client, messages, cache_salt="two")) == 0
    cache = inspected(client)["prefix_cache"]
    assert 0 < cache["hit_tokens"] < cache["queried_tokens"]
    assert cache["pages"] > 0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A server for this file, whose idle sessions expire soon and whose policy a test may change."""
    with (
        Serving(tmp_path_factory.mktemp("own") / "log", "--session-ttl", "0.2", "--api-key", "key") as serving,
        openai.OpenAI(base_url=serving.url + "/v1", api_key="key", timeout=GUARD_SECONDS, max_retries=0) as client,
    ):
        yield client


def test_an_idle_session_expires(own: openai.OpenAI) -> None:
    """The pages of an expired session stay in the prefix cache while the memory is not needed."""
    messages = [user(TURNS[0] * 8)]
    stream = own.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True, "session_id": "brief"},
    )  # fmt: skip
    next(iter(stream))
    session = session_of(own, "brief")
    assert session is not None
    assert session["busy"]
    stream.close()
    until(lambda: session_of(own, "brief") is None, "the session to expire")
    with pytest.raises(openai.NotFoundError):
        end(own, "brief")
    assert cached(turn(own, messages, session_id="brief")) > 0
    assert inspected(own)["evicted_sessions"] == 0


def test_the_policy_is_switched_at_run_time(own: openai.OpenAI) -> None:
    path = str(own.base_url).removesuffix("v1/") + "admin/scheduler"
    before = turn(own, [user(TURNS[0])]).choices[0].message.content
    for policy in ("priority", "decode_first", "fcfs"):
        assert own.post(path, body={"policy": policy}, cast_to=dict[str, Any]) == {"policy": policy}
        assert inspected(own)["policy"] == policy
        assert turn(own, [user(TURNS[0])]).choices[0].message.content == before
    with pytest.raises(openai.BadRequestError, match="lottery") as caught:
        own.post(path, body={"policy": "lottery"}, cast_to=dict[str, Any])
    assert caught.value.param == "policy"
    with pytest.raises(openai.AuthenticationError):
        inspected(own.with_options(api_key="wrong"))
