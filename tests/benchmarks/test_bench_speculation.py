"""The engine of the benchmark of drafts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench_speculation import Bench
from tandem.protocol.engine_options import EngineOptions
from tests.support.model_folder import write_model


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """A `Bench` keeps the log of its engine: leave the logger as it was."""
    logger = logging.getLogger("tandem")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_a_refused_request_ends_the_run(tmp_path: Path) -> None:
    write_model(tmp_path)
    options = EngineOptions(model=str(tmp_path), device="cpu", max_rows=2, max_len=32, kv_tokens=256, threads=1)
    bench = Bench(options)
    assert bench.generate([[5, 9, 14]] * 2, 8, False)["per step"] == 1
    with pytest.raises(RuntimeError, match="context_length"):
        bench.generate([[5, 9, 14], [5] * 40], 8, False)
