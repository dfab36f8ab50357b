"""Log lines, written by a process of their own: what level and library they are of, and in which form."""

import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.logs import LineHandler, field_text, json_line, printable, with_fields

PROGRAM = """
import logging, sys
from tandem.protocol.logs import configure_logging
configure_logging("engine", sys.argv[1])
logging.getLogger("tandem.a").debug("detail")
logging.getLogger("tandem.a").info("news")
logging.getLogger("uvicorn.error").info("Started server process")
logging.getLogger("uvicorn.error").warning("trouble")
logging.getLogger("asyncio").debug("Using selector")
logging.getLogger("tandem.a").error("failure")
"""

FAILURES = r"""
import logging, sys, threading, warnings
from tandem.protocol.logs import announce, configure_logging, refuse
configure_logging("frontend-1", "info", sys.argv[1])
class Fault(Exception): pass
try:
    raise Fault("one\n2026-11-22T15:20:01.123Z forged\x1b[31m")
except Fault:
    logging.getLogger("tandem.a").exception("it failed for %s", "a\nb")
warnings.warn("deprecated")
announce("ready")
refuse("tandem", "a usage error")
refuse("tandem", "a refusal of a child:\n  one\x1b[31m\n2026-11-22T15:20:01.123Z two", is_child=True)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise Fault("the end")
"""
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("debug", ["detail", "news", "Started server process", "trouble", "Using selector", "failure"]),
        ("info", ["news", "trouble", "failure"]),
        ("warning", ["trouble", "failure"]),
        ("error", ["failure"]),
    ],
)
def test_lines_have_time_process_and_level(level: str, messages: list[str]) -> None:
    lines = [line.split(" ", 3) for line in run(PROGRAM, level).stderr.splitlines()]
    assert [message for *_, message in lines] == messages
    assert {process for _, process, *_ in lines} == {"engine"}
    assert all(STAMP.fullmatch(stamp) for stamp, *_ in lines)
    assert lines[-1][2] == "ERROR"


def test_the_lines_of_a_traceback_are_indented_and_escaped() -> None:
    done = run(FAILURES, "text")
    lines = done.stderr.splitlines()
    heads = [line.split(" ", 3)[1:] for line in lines if STAMP.match(line)]
    assert [level for _, level, _ in heads] == ["ERROR", "WARNING", "ERROR", "CRITICAL", "CRITICAL"]
    messages = [message.split(":")[0] for _, _, message in heads]
    assert messages[:3] == [r"it failed for a\nb", "<string>", "a refusal of a child"]
    rest = [line for line in lines if not STAMP.match(line) and line != "tandem: a usage error"]
    assert all(line.startswith("    ") for line in rest)
    assert any(line == r"    2026-11-22T15:20:01.123Z forged\x1b[31m" for line in rest)
    first = next(place for place, line in enumerate(lines) if line.endswith("a refusal of a child:"))
    assert lines[first + 1 : first + 3] == [r"      one\x1b[31m", "    2026-11-22T15:20:01.123Z two"]
    assert (done.stdout, done.returncode) == ("ready\n", 1)


def test_json_is_one_object_a_line_whatever_fails() -> None:
    done = run(FAILURES, "json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["error", "warning", "info", "error", "error", "critical", "critical"]
    assert all(line["process"] == "frontend-1" and STAMP.fullmatch(line["time"]) for line in lines)
    failed, *_, in_thread, last = lines
    assert failed["logger"] == "tandem.a" and failed["message"] == "it failed for a\nb"
    assert "Fault: one\n2026" in failed["exception"]
    assert "ZeroDivisionError" in in_thread["exception"] and "Fault: the end" in last["exception"]
    assert done.stdout == ""


def record_of(message: str, **fields: object) -> logging.LogRecord:
    logger = logging.getLogger("tandem.audit")
    return logger.makeRecord(logger.name, logging.INFO, "", 0, "%s", (message,), None, None, with_fields(**fields))


@given(st.text(), st.text())
def test_no_text_forges_a_line_or_a_field(message: str, value: str) -> None:
    record = record_of(message, key=value, left_out=None)
    text = LineHandler("engine", "text", sys.stderr).format(record)
    assert text.isprintable()
    head, _, field = text.rpartition(" key=")
    assert head.split(" ", 4)[1:4] == ["engine", "INFO", "tandem.audit:"]
    assert " " not in field or (field[0], field[-1]) == ('"', '"')
    line = LineHandler("engine", "json", sys.stderr).format(record)
    assert line.isascii() and line.isprintable()
    assert {name: json.loads(line)[name] for name in ("message", "key")} == {"message": message, "key": value}


@given(st.text())
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("stop", "stop"), ("127.0.0.1:80", "127.0.0.1:80"), (3, "3"), (0.25, "0.2500"), ("", '""'), ("a b", '"a b"'),
     ('a"b\\', '"a\\"b\\\\"'), ("a=b", '"a=b"'), ("\x1b[0m", '"\\x1b[0m"')],
)  # fmt: skip
def test_a_field_is_quoted_unless_it_is_a_word(value: object, shown: str) -> None:
    assert field_text(value) == shown


def test_json_takes_halves_of_surrogate_pairs() -> None:
    assert json.loads(json_line({"a": "\ud800"})) == {"a": "\ud800"}


def test_times_are_utc_to_the_millisecond() -> None:
    stamps = LineHandler("engine", "text", sys.stderr).timestamps
    for seconds in (0.0, 1.25, 1.999, 1_700_000_000.5):
        stamp = datetime.fromisoformat(stamps.at(seconds))
        assert stamp.tzinfo == UTC and abs(stamp.timestamp() - seconds) <= 0.001
