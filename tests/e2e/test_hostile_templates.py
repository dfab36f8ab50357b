"""Hostile chat templates under a real server: each costs at most the process that renders, and no stream or chat.

One template does what the last message names. All of these calls stay within the sandbox's bounds and hold the
interpreter for seconds to minutes, or take gigabytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_engine import Script
from tests.support.refusals import numbers_in
from tests.support.scripted_serving import ScriptedServing
from tests.support.stream_client import Stream, StreamClient, completion

RESTARTS = "tandem_template_process_restarts_total"
TOKENS = 1900
"""Tokens of a stream that is open throughout a test: at 10 a second, 190 s."""
GUARD_SECONDS = 300.0
MIN_READS = 5
"""Reads that an open stream gets at least while a conversation is rendered for 5 s, at 10 tokens a second."""
SHARED = (
    "{% set ns = namespace(x=[1], y=[1]) %}"
    "{% for _ in range(28) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
"""Two lists that hold themselves 2^28 times."""
ENDLESS = {
    "tojson": SHARED + "{{ ns.x | tojson }}",
    "printing": SHARED + "{{ ns.x }}",
    "equality": SHARED + "{{ ns.x == ns.y }}",
}
"""Templates with one call that takes longer than the process may."""
LARGE = {
    "wordwrap": "{{ ('a ' * 2**24) | wordwrap(1) | length }}",
    "title": "{{ ('a ' * 2**25) | title | length }}",
    "translate": "{{ ('a' * 2**20).translate({97: 'b' * 2**12}) | length }}",
    "split": "{{ ('a,' * 2**25).split(',') | map('upper') | list | length }}",
    "bytes": "{{ (1).to_bytes(2**31, 'big') | length }}",
}
"""Templates that take too long or too much memory, depending on the machine."""


def write_template(path: Path, bodies: dict[str, str]) -> Path:
    cases = "".join(f"{{% elif wanted == '{name}' %}}{body}" for name, body in bodies.items())
    path.write_text(
        "{% set wanted = messages[-1].content %}{% if wanted == 'plain' %}user: plain\nassistant:"
        f"{cases}{{% endif %}}"
    )
    return path


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServing]:
    folder = tmp_path_factory.mktemp("hostile")
    template = write_template(folder / "template.jinja", ENDLESS | LARGE)
    script = Script(tokens_per_second=10.0)
    with ScriptedServing(folder / "log", "--chat-template", str(template), script=script) as running:
        yield running


def chat(content: str) -> bytes:
    body = {"model": "tandem-default", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return json.dumps(body | {"ignore_eos": True}).encode()


def ask(client: StreamClient, content: str) -> Stream:
    (stream,) = client.open(chat(content), path="/v1/chat/completions")
    return stream


def restarts(serving: ScriptedServing) -> dict[str, float]:
    text = serving.metrics().splitlines()
    found = (line.rsplit(" ", 1) for line in text if line.startswith(RESTARTS))
    return {series.partition('reason="')[2].partition('"')[0]: float(number) for series, number in found}


def failure(stream: Stream) -> dict[str, Any]:
    assert stream.status == 400, stream.message
    error: dict[str, Any] = json.loads(stream.message)["error"]
    assert error["param"] == "messages"
    return error


def costs_one_process_at_most(serving: ScriptedServing, name: str) -> tuple[str, dict[str, float], int]:
    """Ask for a hostile conversation beside an open stream and another chat.

    Returns its error, the restarts that it cost by reason, and the reads of the stream while it was rendered.
    """
    before = restarts(serving)
    with StreamClient(serving.address, records=True) as client:
        (stream,) = client.open(completion(TOKENS))
        client.until_ended([ask(client, "plain")], GUARD_SECONDS)
        client.until_streaming([stream], GUARD_SECONDS)
        reads = len(stream.arrivals)
        guilty = ask(client, name)
        plain = [ask(client, "plain") for _ in range(3)]
        client.until_ended([guilty], GUARD_SECONDS)
        reads = len(stream.arrivals) - reads
        client.until_ended(plain, GUARD_SECONDS)
        assert [one.outcome for one in plain] == ["done"] * 3
        received = stream.num_tokens
        client.until(lambda: stream.num_tokens > received, "more tokens", GUARD_SECONDS)
        assert (stream.outcome, stream.problem) == ("", "")
    after = restarts(serving)
    cost = {reason: number - before.get(reason, 0.0) for reason, number in after.items()}
    return failure(guilty)["message"], {reason: number for reason, number in cost.items() if number}, reads


def check_endless(serving: ScriptedServing, name: str) -> None:
    message, cost, reads = costs_one_process_at_most(serving, name)
    assert numbers_in(message)[-1:] == [5] and "too long" in message
    assert cost == {"time": 1.0}
    assert reads >= MIN_READS


def check_large(serving: ScriptedServing, name: str) -> None:
    message, cost, _ = costs_one_process_at_most(serving, name)
    assert "too long" in message or "of memory" in message, message
    assert cost in ({}, {"time": 1.0}, {"ended": 1.0})


def test_endless_call_of_a_template_costs_its_process_and_no_stream(serving: ScriptedServing) -> None:
    check_endless(serving, "tojson")


def test_template_that_takes_gigabytes_costs_at_most_its_process(serving: ScriptedServing) -> None:
    check_large(serving, "bytes")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENDLESS.keys() - {"tojson"}))
def test_each_endless_call_costs_its_process_and_no_stream(serving: ScriptedServing, name: str) -> None:
    check_endless(serving, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE.keys() - {"bytes"}))
def test_each_large_value_costs_at_most_its_process(serving: ScriptedServing, name: str) -> None:
    check_large(serving, name)
