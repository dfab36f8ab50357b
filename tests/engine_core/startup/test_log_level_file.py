"""The file with which a supervisor changes an engine's log level."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.engine_core.startup.log_level_file import LogLevelFile
from tests.support.serving import until


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    before = found.level
    yield found
    found.setLevel(before)


def test_only_levels_are_taken_and_each_once(tmp_path: Path, root: logging.Logger) -> None:
    path = tmp_path / "log-level"
    file = LogLevelFile(path)
    root.setLevel(logging.WARNING)
    for content, level in ((None, logging.WARNING), (b"debug", logging.DEBUG), (b"loud", logging.DEBUG),
                           (b"\xff", logging.DEBUG), (b"error", logging.ERROR)):  # fmt: skip
        if content is not None:
            path.write_bytes(content)
        file.read()
        assert root.level == level
    root.setLevel(logging.INFO)
    file.read()
    assert root.level == logging.INFO


def test_a_change_is_followed_until_the_end(tmp_path: Path, root: logging.Logger) -> None:
    path = tmp_path / "log-level"
    path.write_text("error")
    file = LogLevelFile(path, poll_seconds=0.001)
    file.start()
    assert root.level == logging.ERROR
    path.write_text("debug")
    until(lambda: root.level == logging.DEBUG, "the level of the file")
    file.stop()
    path.write_text("error")
    file.read()
    assert root.level == logging.ERROR
