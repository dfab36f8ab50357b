"""What tests do to a server of their own: its sessions expire, its policy changes, and in the end it is stopped."""

import signal
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import openai
import pytest

from tests.support.serving import GUARD_SECONDS, Serving, until
from tests.support.session_calls import MODEL, TURNS, cached, end, inspected, session_of, turn, user

PROMPT = "Tell me about os.path.join"
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose idle sessions expire soon, and which the last test stops."""
    folder = tmp_path_factory.mktemp("own")
    digest = sha256(b"key").hexdigest()
    (folder / "keys").write_text(f'[[key]]\nname = "own"\nsha256 = "{digest}"\nrights = ["generate", "admin"]\n')
    (folder / "keys").chmod(0o600)
    flags = ("--session-ttl", "0.2", "--api-keys", str(folder / "keys"), "--drain-timeout", "0.5")
    with Serving(folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def own(serving: Serving) -> Iterator[openai.OpenAI]:
    """A client of the server of this file."""
    with openai.OpenAI(base_url=serving.url + "/v1", api_key="key", timeout=GUARD_SECONDS, max_retries=0) as client:
        yield client


def test_an_idle_session_expires(own: openai.OpenAI) -> None:
    """The pages of an expired session stay in the prefix cache while the memory is not needed."""
    messages = [user(TURNS[0] * 8)]

    def is_seen_busy() -> bool:
        """Tell whether the session is busy during a stream, unless that has ended before."""
        with own.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1500, stream=True,
            extra_body={"ignore_eos": True, "session_id": "brief"},
        ) as stream:  # fmt: skip
            next(iter(stream))
            session = session_of(own, "brief")
        return session is not None and bool(session["busy"])

    until(is_seen_busy, "a busy session")
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


def test_sigterm_ends_open_streams_and_exits_with_0(serving: Serving, own: openai.OpenAI) -> None:
    stream = own.completions.create(
        model="tandem-default", prompt=PROMPT, max_tokens=1900, stream=True, extra_body=ENDLESS
    )
    chunks = iter(stream)
    next(chunks)
    assert serving.process is not None
    children = [serving.child("tandem.frontend"), serving.child("tandem.engine_core")]
    serving.process.send_signal(signal.SIGTERM)
    ended = None
    try:
        for chunk in chunks:
            ended = chunk.choices[0].finish_reason
    except openai.APIError:
        ended = "error"
    assert ended in ("error", "length"), "an open stream ends in exactly one way, and never just stops"
    assert serving.process.wait(GUARD_SECONDS) == 0
    assert not [child for child in children if child.is_running()]
