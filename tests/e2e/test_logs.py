"""The log of a whole service as JSON."""

import json
from pathlib import Path

import httpx

from tests.support.scripted_serving import ScriptedServing


def test_every_line_of_a_service_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "log"
    flags = ("--frontends", "1", "--log-format", "json")
    with ScriptedServing(path, *flags) as served:
        body = {"model": "tandem-default", "prompt": "one two", "max_tokens": 3}
        headers = {"x-request-id": "find-me"}
        assert httpx.post(served.url + "/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
        policy = {"policy": "decode_first"}
        assert httpx.post(served.url + "/admin/scheduler", json=policy, timeout=30).status_code == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["process"] for line in lines} == {"supervisor", "engine", "frontend"}
    assert any(line["message"].startswith("tandem is ready on ") for line in lines)
    (line,) = [line for line in lines if line["logger"] == "tandem.audit"]
    assert line["message"].startswith("POST /admin/scheduler key=- client=127.0.0.1:")
    (line,) = [line for line in lines if line.get("request_id") == "find-me"]
    assert (line["logger"], line["route"], line["status"]) == ("tandem.access", "/v1/completions", 200)
    assert (line["output_tokens"], line["finish_reason"], line["end"]) == (3, "length", "complete")
    assert 0 < line["ttft"] <= line["duration"]
