"""A ZMQ context of each test's own, closed with everything in it, and directories with short names."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.zmq_context import KeepingContext


@pytest.fixture
def context() -> Iterator[KeepingContext]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A private directory with a short path, as that of a unix socket is limited to about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="td-") as path:
        yield Path(path)
