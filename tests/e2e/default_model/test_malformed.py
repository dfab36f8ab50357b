"""Malformed bodies against real processes: none reaches the engine, and no state is left behind."""

import http.client
import json
import random
from typing import Any

from tandem.frontend.api.messages.errors import anthropic_status
from tandem.frontend.api.request_scope import ANTHROPIC_PREFIX
from tests.frontend.api.test_malformed import Case, cases
from tests.support.serving import GUARD_SECONDS, Serving, until

SAMPLE = 120
ACCEPTED = "tandem_requests_accepted_total"


def send(serving: Serving, case: Case) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=GUARD_SECONDS)
    try:
        content = case.content.replace(b'"fake-model"', b'"tandem-default"')
        connection.request("POST", case.path, content, {"content-type": "application/json", **case.headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def is_refused(case: Case, status: int, answer: dict[str, Any]) -> bool:
    """Return True for a status of the case, with an error in the format of its API."""
    if case.path.startswith(ANTHROPIC_PREFIX):
        statuses, keys = [anthropic_status(status, None) for status in case.statuses], {"type", "message"}
    else:
        statuses, keys = list(case.statuses), {"message", "type", "param", "code"}
    return status in statuses and answer["error"].keys() == keys


def test_malformed_bodies_get_their_4xx_and_reach_no_engine(serving: Serving) -> None:
    fitting = [case for case in cases() if case.statuses != (413,) and not case.strict]
    good = Case("good", "/v1/completions", b'{"model": "fake-model", "prompt": "What"}')
    assert send(serving, good)[0] == 200
    seen = serving.fresh_engine_metric(ACCEPTED)
    assert seen
    for case in random.Random(7).sample(fitting, SAMPLE):
        status, answer = send(serving, case)
        assert is_refused(case, status, answer), (case.path, case.name, status, answer)
    assert send(serving, good)[0] == 200
    assert serving.fresh_engine_metric(ACCEPTED) == seen + 1, "the good request is counted, and none but it"
    until(lambda: serving.engine_metric("tandem_num_requests_running") == 0, "all rows are free")
