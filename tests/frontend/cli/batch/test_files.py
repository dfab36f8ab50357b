"""Valid and invalid batch files, and resuming from an interrupted output."""

import codecs
import errno
import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from tandem.frontend.cli.batch.files import (
    MAX_ID_CHARS,
    MAX_REPORTED,
    BatchError,
    BatchFailure,
    BatchResponse,
    open_output,
    read_requests,
    result,
)
from tests.support.refusals import numbers_in

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_requests_keep_their_order_and_body_bytes(tmp_path: Path) -> None:
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
        ({**LINE, "custom_id": ""}, "1 to"),
        ({**LINE, "custom_id": "x" * (MAX_ID_CHARS + 1)}, "not 513"),
        ({**LINE, "custom_id": "first"}, "custom_id 'first' .* line 1"),
        ({**LINE, "method": "GET"}, "method .*POST.* 'GET'"),
        ({**LINE, "url": "/v1/embeddings"}, "url .*/v1/completions"),
        ({**LINE, "body": 3}, "Expected `object`"),
        ({**LINE, "body": {"stream": True}}, "streaming"),
        ({**LINE, "more": 1}, "`more`"),
        ({key: LINE[key] for key in ("custom_id", "method", "url")}, "`body`"),
        ("[" * 100_000, "in:2: "),
    ],
)
def test_invalid_line_is_reported_with_its_number(line: dict[str, Any] | str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in", {**LINE, "custom_id": "first"}, line)
    with pytest.raises(BatchError, match=reason):
        read_requests(path)


def test_all_invalid_lines_are_reported_at_once(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [LINE, {**LINE, "url": "/v1/foo"}, LINE, "{", {**LINE, "custom_id": "b"}]
    with pytest.raises(BatchError) as caught:
        read_requests(write(tmp_path / "in", *lines))
    reports = str(caught.value).splitlines()
    assert [report.partition("in:")[2][:2] for report in reports[:3]] == ["2:", "3:", "4:"]
    assert numbers_in(reports[3].rpartition("in:")[2]) == [3]
    with pytest.raises(BatchError) as caught:
        read_requests(write(tmp_path / "in", *["{"] * (MAX_REPORTED + 5)))
    assert len(str(caught.value).splitlines()) == MAX_REPORTED + 1
    assert numbers_in(str(caught.value).rpartition("in:")[2]) == [5]


def test_missing_input_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=re.escape(str(tmp_path / "none"))):
        read_requests(tmp_path / "none")


def test_output_truncated_at_any_byte_is_continued(tmp_path: Path) -> None:
    """Check that every id has exactly one result in the end, wherever the output was cut."""
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


def test_output_follows_openais_batch_format(tmp_path: Path) -> None:
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


def test_file_that_is_not_an_output_is_left_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "in", LINE)
    before = path.read_bytes()
    with pytest.raises(BatchError, match=r"\bin:1\b"), open_output(path):
        pass
    assert path.read_bytes() == before
    line = '{"id":"i","custom_id":"a","response":null,"error":{"code":"c","message":"m"}}'
    with (
        pytest.raises(BatchError, match="'a'"),
        open_output(write(path, line, line)),
    ):
        pass
    for place in (tmp_path, Path("/dev/full")):
        with pytest.raises(BatchError, match=re.escape(str(place))), open_output(place):
            pass
    with pytest.raises(BatchError, match=re.escape(str(tmp_path / "none"))), open_output(tmp_path / "none" / "out"):
        pass


def test_output_is_locked_against_a_second_run(tmp_path: Path) -> None:
    with (
        open_output(tmp_path / "out"),
        pytest.raises(BatchError, match=re.escape(str(tmp_path / "out"))),
        open_output(tmp_path / "out"),
    ):
        pass


def test_output_on_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out"
    answer = BatchResponse(200, "r", Raw(b"{}"))
    with open_output(path) as output:
        output.add(result("a", answer))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limit[1]))
        try:
            with pytest.raises(BatchError, match=rf"/out\b.*{os.strerror(errno.EFBIG)}"):
                output.add(result("b", answer))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"\n")
    with open_output(path) as output:
        assert output.done == {"a": True}
        output.add(result("b", answer))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize("joint", ["\n", "\r\n", "\n\ufeff", "\r\n\ufeff\r\n\ufeff"])
def test_byte_order_marks_are_skipped(joint: str, tmp_path: Path) -> None:
    """Each of several files that were joined may have one."""
    lines = [json.dumps({**LINE, "custom_id": name}) for name in "ab"]
    (tmp_path / "in").write_bytes((joint.join(lines) + "\n").encode("utf-8-sig"))
    requests = read_requests(tmp_path / "in")
    assert [request.custom_id for request in requests] == ["a", "b"]
    assert bytes(memoryview(requests[0].body)) == json.dumps(LINE["body"]).encode()


def test_file_of_only_a_byte_order_mark_has_no_request(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(codecs.BOM_UTF8)
    assert read_requests(tmp_path / "in") == []


def test_byte_order_mark_within_a_line_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps(LINE) + "\ufeff\n")
    with pytest.raises(BatchError, match=":1: "):
        read_requests(tmp_path / "in")


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named_once(codec: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes("".join(json.dumps(LINE) + "\n" for _ in range(3)).encode(codec))
    with pytest.raises(BatchError) as caught:
        read_requests(tmp_path / "in")
    assert str(caught.value).count("\n") == 0
    assert codec[:6].upper() in str(caught.value)


def test_output_with_a_byte_order_mark_is_resumed(tmp_path: Path) -> None:
    """An editor may add one to an output, of which lines are deleted to send their requests again."""
    path = tmp_path / "out"
    with open_output(path) as output:
        output.add(result("a", BatchFailure("code", "text")))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    with open_output(path) as output:
        output.add(result("b", BatchFailure("code", "text")))
    with open_output(path) as output:
        assert output.done == {"a": False, "b": False}
    path.write_bytes(path.read_text().encode("utf-16"))
    before = path.read_bytes()
    with pytest.raises(BatchError, match="UTF-16"), open_output(path):
        pass
    assert path.read_bytes() == before
