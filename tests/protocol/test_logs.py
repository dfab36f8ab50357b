"""Log lines, written by a process of their own: what level and which library they are of."""

import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 4) for line in done.stderr.splitlines()]
    assert [message for *_, message in lines] == messages
    assert {process for _, _, process, *_ in lines} == {"engine"}
    assert all(len(date) == 10 and time.count(":") == 2 for date, time, *_ in lines)
    assert lines[-1][3] == "ERROR"
