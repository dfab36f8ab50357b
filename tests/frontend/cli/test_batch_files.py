"""What a batch file may hold, and what an interrupted output is worth."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from tandem.frontend.cli.batch_files import (
    MAX_ID_CHARS,
    BatchError,
    BatchFailure,
    BatchResponse,
    open_output,
    read_requests,
    result,
)

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_requests_keep_their_order_and_their_bodies_byte_for_byte(tmp_path: Path) -> None:
    odd = '{"custom_id":"b","method":"POST","url":"/v1/responses","body": {"z":1.50,  "a":"\\u00e9"} }'
    requests = read_requests(write(tmp_path / "in", LINE, "", odd))
    assert [request.custom_id for request in requests] == ["a", "b"]
    assert bytes(memoryview(requests[1].body)) == b'{"z":1.50,  "a":"\\u00e9"}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "in:2: "),
        ("[1]", "in:2: Expected `object`"),
        ({**LINE, "custom_id": 3}, "custom_id"),
        ({**LINE, "custom_id": ""}, "must have 1 to"),
        ({**LINE, "custom_id": "x" * (MAX_ID_CHARS + 1)}, "not 513"),
        ({**LINE, "custom_id": "first"}, "custom_id 'first' is that of line 1, too"),
        ({**LINE, "method": "GET"}, "method must be POST, not 'GET'"),
        ({**LINE, "url": "/v1/embeddings"}, "url must be one of /v1/completions"),
        ({**LINE, "body": 3}, "Expected `object`"),
        ({**LINE, "body": {"stream": True}}, "a batch takes no streams"),
        ({**LINE, "more": 1}, "unknown field `more`"),
        ({key: LINE[key] for key in ("custom_id", "method", "url")}, "missing required field `body`"),
        ("[" * 100_000, "in:2: "),
    ],
)
def test_a_bad_line_is_named(line: dict[str, Any] | str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in", {**LINE, "custom_id": "first"}, line)
    with pytest.raises(BatchError) as caught:
        read_requests(path)
    assert reason in str(caught.value)


def test_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none")


def test_an_output_cut_at_any_byte_is_continued(tmp_path: Path) -> None:
    """Whatever part of it was written, each id is there once in the end."""
    path = tmp_path / "out"
    answer = BatchResponse(200, "r", Raw('{"text":"grüße"}'.encode()))
    outcomes = {"a": answer, "b": BatchFailure("request_timeout", "too long"), "c": answer}
    with open_output(path) as output:
        for name, outcome in outcomes.items():
            output.add(result(name, outcome))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with open_output(path) as output:
            kept = set(output.done)
            assert len(kept) == whole[:cut].count(b"\n")
            for name in outcomes.keys() - kept:
                output.add(result(name, outcomes[name]))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(line["custom_id"] for line in lines) == ["a", "b", "c"], cut
        assert output.done == {"a": True, "b": False, "c": True}


def test_an_output_has_openais_shape(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as output:
        output.add(result("a", BatchResponse(422, "req", Raw(b'{"error":{}}'))))
        output.add(result("b", BatchFailure("x", "y")))
    first, second = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert first.pop("id").startswith("batch_req_")
    assert first == {
        "custom_id": "a",
        "response": {"status_code": 422, "request_id": "req", "body": {"error": {}}},
        "error": None,
    }
    assert (second["response"], second["error"]) == (None, {"code": "x", "message": "y"})


def test_what_is_no_output_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "in", LINE)
    before = path.read_bytes()
    with pytest.raises(BatchError, match="in:1 is no result of a batch"), open_output(path):
        pass
    assert path.read_bytes() == before
    line = '{"id":"i","custom_id":"a","response":null,"error":{"code":"c","message":"m"}}'
    with pytest.raises(BatchError, match="'a' has a result above already"), open_output(write(path, line, line)):
        pass
    with pytest.raises(BatchError, match="cannot be written"), open_output(tmp_path):
        pass


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    with (
        open_output(tmp_path / "out"),
        pytest.raises(BatchError, match="another run writes"),
        open_output(tmp_path / "out"),
    ):
        pass
