"""The log of a whole service as JSON, and a trace into its engine."""

import json
from pathlib import Path

import httpx

from tests.fakes.collector import attributes, collector
from tests.frontend.conftest import until
from tests.support.scripted_serving import ScriptedServing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_every_line_of_a_service_is_an_object_and_a_trace_reaches_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "log"
    flags = ("--frontends", "1", "--log-format", "json")
    with collector() as spans, ScriptedServing(path, *flags, "--otlp-traces-endpoint", spans.url) as served:
        body = {"model": "tandem-default", "messages": [{"role": "user", "content": "one"}], "max_tokens": 3}
        headers = {"x-request-id": "find-me", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert (
            httpx.post(served.url + "/v1/chat/completions", json=body, headers=headers, timeout=120).status_code == 200
        )
        policy = {"policy": "decode_first"}
        assert httpx.post(served.url + "/admin/scheduler", json=policy, timeout=120).status_code == 200
        until(lambda: "tandem is ready on " in path.read_text(), "the supervisor tells that the service is ready")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["process"] for line in lines} == {"supervisor", "engine", "frontend-0"}
    (line,) = [line for line in lines if line["message"].startswith("tandem is ready on ")]
    assert line["playground"] == f"{line['urls'][0]}/" and line["metrics"].endswith("/metrics")
    (line,) = [line for line in lines if line["logger"] == "tandem.audit"]
    assert (line["message"], line["method"], line["path"]) == ("operator request", "POST", "/admin/scheduler")
    assert line["client"].startswith("127.0.0.1:") and line["status"] == 200
    (line,) = [line for line in lines if line.get("request_id") == "find-me"]
    assert (line["logger"], line["route"], line["status"]) == ("tandem.access", "/v1/chat/completions", 200)
    assert (line["output_tokens"], line["finish_reason"], line["end"]) == (3, "length", "complete")
    assert 0 < line["ttft"] <= line["duration"]
    root = spans.named("llm_request")[0]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert [span.name for span in spans.within(root)] == ["parse", "render", "tokenize", "engine"]
    (engine,) = spans.within(root, "engine")
    phases = [spans.within(engine, name)[0] for name in ("queue", "prefill", "decode")]
    points = [root.start_time_unix_nano, engine.start_time_unix_nano]
    points += [point for span in phases for point in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert [*points, engine.end_time_unix_nano, root.end_time_unix_nano] == sorted(
        [*points, engine.end_time_unix_nano, root.end_time_unix_nano]
    )
    assert attributes(engine)["tandem.engine.num_steps"] == 3
