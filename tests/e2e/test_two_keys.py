"""Two API keys try what one must not do to the other, through two frontends of one engine."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.frontend.access.api_key import KeyLimits, Right
from tests.fakes.scripted_engine import Script
from tests.support.api_keys import bearer, make_key, write_keys
from tests.support.refusals import numbers_in
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, Serving, until

pytestmark = pytest.mark.slow  # two servers of several processes each

MODEL = "tandem-default"
PROMPT = "What does textwrap.dedent do with the lines of a text that have blanks at their beginning? " * 4


def key_file(folder: Path) -> Path:
    alice = KeyLimits(max_concurrent=3, max_priority=2)
    return write_keys(
        folder / "keys.toml",
        make_key("alice", limits=alice),
        make_key("alice-new", name="alice", limits=alice),
        make_key("bob", limits=KeyLimits(max_priority=0)),
        make_key("meter", limits=KeyLimits(tokens_per_minute=1000, max_priority=0)),
        make_key("root", rights=(Right.ADMIN,)),
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServing]:
    folder = tmp_path_factory.mktemp("keys")
    flags = ("--frontends", "2", "--api-keys", str(key_file(folder)))
    with ScriptedServing(folder / "log", *flags, script=Script(tokens_per_second=20.0)) as running:
        until(lambda: running.num_serving() == 2, "both frontends serve")
        yield running


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with a real engine, which has a prefix cache."""
    folder = tmp_path_factory.mktemp("computing")
    flags = ("--frontends", "2", "--api-keys", str(key_file(folder)))
    with Serving(folder / "log", *flags) as running:
        yield running


def ask(serving: Serving, key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """Send a request on a connection of its own, which either frontend may get."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **fields}
    return httpx.post(serving.url + path, headers=bearer(key), json=body, timeout=GUARD_SECONDS)


def call(serving: Serving, method: str, path: str, key: str) -> httpx.Response:
    return httpx.request(method, serving.url + path, headers=bearer(key), timeout=GUARD_SECONDS)


def test_one_key_cannot_read_or_delete_what_another_stored(serving: ScriptedServing) -> None:
    fields = {"model": MODEL, "input": "hello", "max_output_tokens": 2}
    made = httpx.post(serving.url + "/v1/responses", headers=bearer("alice"), json=fields, timeout=GUARD_SECONDS).json()
    path = f"/v1/responses/{made['id']}"
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        assert call(serving, method, path + suffix, "bob").status_code == 404
    continued = {**fields, "previous_response_id": made["id"]}
    for key, status in (("bob", 400), ("alice", 200)):
        answer = httpx.post(serving.url + "/v1/responses", headers=bearer(key), json=continued, timeout=GUARD_SECONDS)
        assert answer.status_code == status, answer.text
    assert call(serving, "DELETE", path, "alice-new").status_code == 200, "a new key of the same name"


def cached_tokens(serving: Serving, key: str, **fields: Any) -> int:
    answer = ask(serving, key, **fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_two_keys_never_meet_in_a_session(computing: Serving) -> None:
    assert [cached_tokens(computing, key, session_id="talk") for key in ("alice", "bob")] == [0, 0]
    shown = call(computing, "GET", "/admin/scheduler", "root").json()
    assert [(one["session_id"], one["key"]) for one in shown["sessions"]] == [("talk", "alice"), ("talk", "bob")]
    assert call(computing, "DELETE", "/v1/sessions/talk", "meter").status_code == 404
    assert call(computing, "DELETE", "/v1/sessions/talk", "bob").status_code == 200
    assert call(computing, "DELETE", "/v1/sessions/talk", "alice-new").status_code == 200, "a new key of the same name"


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "shared salt"}])
def test_one_key_cannot_tell_from_the_cache_what_another_sent(computing: Serving, fields: dict[str, str]) -> None:
    prompt = f"{fields}: {PROMPT}"
    assert [cached_tokens(computing, key, prompt=prompt, **fields) for key in ("alice", "bob")] == [0, 0]
    assert cached_tokens(computing, "alice-new", prompt=prompt, **fields) > 0, "a new key of the same name"
    assert cached_tokens(computing, "bob", prompt=prompt, **fields) > 0


def test_a_key_cannot_raise_its_priority_or_administer(serving: ScriptedServing) -> None:
    assert ask(serving, "alice", priority=2).status_code == 200
    for key, priority, most in (("alice", 3, 2), ("bob", 1, 0)):
        refused = ask(serving, key, priority=priority)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "priority"
        assert repr(key) in error["message"] and "(max_priority)" in error["message"]
        assert numbers_in(error["message"]) == [priority, most]
    for key in ("alice", "bob"):
        for method, path in (("GET", "/admin/scheduler"), ("POST", "/admin/pause"), ("GET", "/metrics")):
            assert call(serving, method, path, key).status_code == 403
    assert ask(serving, "root").status_code == 403


def test_sequences_in_progress_are_limited_over_both_frontends_and_starve_no_other_key(
    serving: ScriptedServing,
) -> None:
    async def crowd(key: str) -> list[httpx.Response]:
        # Each client has a connection of its own, so that both frontends get some.
        async def one() -> httpx.Response:
            async with httpx.AsyncClient(timeout=GUARD_SECONDS) as client:
                body = {"model": MODEL, "prompt": "hello", "max_tokens": 40}
                return await client.post(serving.url + "/v1/completions", headers=bearer(key), json=body)

        return list(await asyncio.gather(*(one() for _ in range(12))))

    async def both() -> tuple[list[httpx.Response], list[httpx.Response]]:
        alice, bob = await asyncio.gather(crowd("alice"), crowd("bob"))
        return alice, bob

    alice, bob = asyncio.run(both())
    assert [answer.status_code for answer in bob] == [200] * 12
    assert sorted(answer.status_code for answer in alice) == [200] * 3 + [429] * 9
    refused = next(answer for answer in alice if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert (refused.headers["x-ratelimit-limit-requests"], refused.headers["x-ratelimit-remaining-requests"]) == (
        "3",
        "0",
    )
    assert "x-ratelimit-limit-tokens" not in refused.headers
    assert "x-ratelimit-limit-requests" not in bob[0].headers
    whole = ask(serving, "alice", n=4)
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "n")


def test_tokens_a_minute_are_limited_in_the_shape_of_each_route(serving: ScriptedServing) -> None:
    answers: list[httpx.Response] = []
    while not answers or answers[-1].status_code == 200:
        answers.append(ask(serving, "meter"))
        assert len(answers) < 100
    spent = sum(answer.json()["usage"]["total_tokens"] for answer in answers[:-1])
    refused = answers[-1]
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    needed = answers[0].json()["usage"]["prompt_tokens"]
    assert 1000 - needed <= spent, "refused too early"
    assert refused.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < needed
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": PROMPT}]}
    answer = httpx.post(serving.url + "/v1/messages", headers={"x-api-key": "meter"}, json=body, timeout=GUARD_SECONDS)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["anthropic-ratelimit-tokens-limit"] == "1000"
    with ExitStack() as stack:
        stream = stack.enter_context(
            httpx.stream(
                "POST", serving.url + "/v1/completions", headers=bearer("meter"), timeout=GUARD_SECONDS,
                json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True},
            )
        )  # fmt: skip
        assert stream.status_code == 429
