"""Malformed bodies against real processes: none reaches the engine, and no state is left behind."""

import http.client
import json
import random

from tests.frontend.api.test_malformed import Case, cases
from tests.support.serving import GUARD_SECONDS, Serving, until

SAMPLE = 120
ACCEPTED = "tandem_requests_accepted_total"


def send(serving: Serving, case: Case) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=GUARD_SECONDS)
    try:
        content = case.content.replace(b'"fake-model"', b'"tandem-default"')
        connection.request("POST", case.path, content, {"content-type": "application/json", **case.headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_malformed_bodies_get_their_4xx_and_reach_no_engine(serving: Serving) -> None:
    fitting = [case for case in cases() if case.statuses != (413,)]
    good = Case("good", "/v1/completions", b'{"model": "fake-model", "prompt": "What"}')
    assert send(serving, good)[0] == 200
    seen = serving.fresh_engine_metric(ACCEPTED)
    assert seen
    for case in random.Random(7).sample(fitting, SAMPLE):
        status, answer = send(serving, case)
        assert status in case.statuses, (case.path, case.name, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
    assert send(serving, good)[0] == 200
    assert serving.fresh_engine_metric(ACCEPTED) == seen + 1, "the good request is counted, and none but it"
    until(lambda: serving.engine_metric("tandem_num_requests_running") == 0, "all rows are free")
