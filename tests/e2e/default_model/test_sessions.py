"""Sessions, cached tokens and the scheduler of a real server, through the official client."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tandem.frontend.cli.main import main
from tests.support.serving import Serving, until
from tests.support.session_calls import MODEL, TURNS, cached, end, inspected, session_of, turn, user


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


def refused_turn(client: openai.OpenAI, session: str) -> openai.ConflictError | None:
    """Ask for a turn of a busy session; return its refusal, or None if the turn before has ended by then."""
    try:
        turn(client, [user(TURNS[0])], session_id=session)
    except openai.ConflictError as error:
        return error
    return None


def test_a_second_request_on_a_busy_session_is_409(client: openai.OpenAI) -> None:
    def is_refused_while_busy() -> bool:
        with client.completions.create(
            model=MODEL, prompt=TURNS[0] * 8, max_tokens=1800, stream=True,
            extra_body={"ignore_eos": True, "session_id": "busy", "priority": 5},
        ) as stream:  # fmt: skip
            next(iter(stream))
            refused, session = refused_turn(client, "busy"), session_of(client, "busy")
            rows = [one for one in inspected(client)["sequences"] if one["session_id"] == "busy"]
        if refused is None or session is None or not rows:
            return False
        assert (refused.code, refused.param) == ("session_busy", "session_id")
        assert refused.response.headers["retry-after"] == "1"
        assert session["busy"]
        assert [(one["priority"], one["state"]) for one in rows] == [(5, "decode")]
        return True

    def idle() -> bool:
        session = session_of(client, "busy")
        return session is not None and not session["busy"]

    until(is_refused_while_busy, "a refusal within the turn before")
    until(idle, "the turn to end")
    end(client, "busy")


def test_a_busy_session_is_deleted_after_its_turn(client: openai.OpenAI) -> None:
    def is_deleted_while_busy() -> bool:
        with client.completions.create(
            model=MODEL, prompt="Tell me", max_tokens=1800, stream=True,
            extra_body={"ignore_eos": True, "session_id": "ending"},
        ) as stream:  # fmt: skip
            next(iter(stream))
            try:
                first, second = end(client, "ending"), end(client, "ending")
            except openai.NotFoundError:
                return False
            assert first == second, "until then it is there"
            return refused_turn(client, "ending") is not None

    until(is_deleted_while_busy, "a deletion within a turn")
    until(lambda: session_of(client, "ending") is None, "the session to end with its turn")


def test_requests_of_different_salts_share_no_kv(client: openai.OpenAI) -> None:
    messages = [user("Tell me about heapq.heappush, " * 8)]
    assert cached(turn(client, messages, cache_salt="one")) == 0
    assert cached(turn(client, messages, cache_salt="one")) > 0
    assert cached(turn(client, messages, cache_salt="two")) == 0
    cache = inspected(client)["prefix_cache"]
    assert 0 < cache["hit_tokens"] < cache["queried_tokens"]
    assert cache["pages"] > 0
