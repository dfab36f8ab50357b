"""Clients with hostile schemas beside one with ordinary ones, under a real server without API keys."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_engine import Script
from tests.support.hostile_schemas import constrained, hostile_schema, ordinary_schema
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import Serving
from tests.support.stream_client import Stream, StreamClient, completion

CLIENTS, CHEAP, ORDINARY = 16, 100, 40
GUARD_SECONDS = 10.0
"""Ten times what 99 of 100 cheap grammars may take on an idle machine."""
LONGEST_SECONDS = 300.0


def hostile(number: int) -> bytes:
    """Build a completion whose schema takes seconds to check, unlike any other."""
    patterns = [{"pattern": f"^.*{chr(97 + index % 26)}{index}x{number}.*$"} for index in range(300)]
    schema = {"type": "string", "allOf": patterns}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return completion(2, stream=False, response_format=form)


def cheap(number: int) -> bytes:
    """Build a completion with a new grammar, whose check finds an error: the scripted engine compiles none."""
    return completion(2, stream=False, grammar=f"start: missing{number}")


@pytest.mark.slow
def test_cheap_new_grammars_do_not_wait_for_those_of_hostile_clients(tmp_path: Path) -> None:
    """The hostile ones come back as soon as they are answered, each time with another schema."""
    with ScriptedServing(tmp_path / "log", script=Script()) as serving, serving.clients() as client:
        attacks = [*(client.open(hostile(number))[0] for number in range(CLIENTS))]
        seconds = []
        for number in range(CHEAP):
            began = time.monotonic()
            (stream,) = client.open(cheap(number))
            while not stream.outcome:
                assert time.monotonic() < began + LONGEST_SECONDS, stream.message
                client.poll(0.02)
                attacks += come_back(client.open, attacks, hostile)
            seconds.append(stream.ended - stream.opened)
            assert stream.status == 400 and "unknown name" in stream.message
        answered = [attack for attack in attacks if attack.outcome]
        assert {attack.status for attack in answered} <= {400, 429}
        assert all("CPU time" in json.loads(a.message)["error"]["message"] for a in answered if a.status == 400)
        assert sorted(seconds)[CHEAP * 99 // 100 - 1] < GUARD_SECONDS, sorted(seconds)[-5:]


@pytest.mark.slow
def test_ordinary_new_schemas_do_not_wait_for_hostile_ones_that_the_engine_compiles(tmp_path: Path) -> None:
    with (
        Serving(tmp_path / "log", "--device", "cpu") as serving,
        StreamClient(serving.address, has_letters=False) as client,
    ):
        attacks = come_back(client.open, [], hostile_constraint)
        seconds = []
        for number in range(ORDINARY):
            (stream,) = client.open(constrained(ordinary_schema(number)))
            while not stream.outcome:
                assert time.monotonic() < stream.opened + LONGEST_SECONDS, stream.message
                client.poll(0.02)
                attacks += come_back(client.open, attacks, hostile_constraint)
            seconds.append(stream.ended - stream.opened)
            assert stream.status == 200, stream.message
        client.until(lambda: any(a.status == 200 for a in attacks), "a hostile schema to pass", LONGEST_SECONDS)
        answered = [attack for attack in attacks if attack.outcome]
        assert {attack.status for attack in answered} <= {200, 400, 429}
        assert all("CPU time" in attack.message for attack in answered if attack.status == 400)
        assert sorted(seconds)[ORDINARY * 99 // 100 - 1] < GUARD_SECONDS, sorted(seconds)[-5:]


@pytest.mark.slow
def test_engine_killed_while_it_compiles_costs_no_request(tmp_path: Path) -> None:
    """Their grammars were checked and they had no output: the next engine gets them again."""
    with (
        Serving(tmp_path / "log", "--device", "cpu") as serving,
        StreamClient(serving.address, has_letters=False) as client,
    ):
        waiting = [client.open(hostile_constraint(4 * number + 1))[0] for number in range(2)]
        client.until(lambda: serving.engine_metric("tandem_num_requests_waiting"), "a grammar in the engine", 120.0)
        engine = serving.engine
        engine.kill()
        client.until_ended(waiting, LONGEST_SECONDS)
        # On a loaded machine they are not compiled in time.
        assert all(stream.outcome == "done" and stream.status in (200, 429) for stream in waiting), waiting[0].message
        assert serving.engine.pid != engine.pid


def hostile_constraint(number: int) -> bytes:
    return constrained(hostile_schema(number))


def come_back(open_stream: Any, attacks: list[Stream], body: Callable[[int], bytes]) -> list[Stream]:
    missing = CLIENTS - sum(not attack.outcome for attack in attacks)
    return [open_stream(body(len(attacks) + index))[0] for index in range(missing)]
