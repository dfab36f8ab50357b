"""A short run of the benchmark matrix against a server whose engine is scripted, or on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.matrix.bench import Bench
from benchmarks.matrix.configurations import Configuration, matrix
from benchmarks.matrix.long_prompts import LongPrompts
from benchmarks.matrix.scenarios import scenarios
from benchmarks.matrix.server import Server
from tandem.frontend.cli.bench.clients import Clients
from tests.fakes.scripted_engine import Script
from tests.support.serving import Serving, until
from tests.support.tandem_with_fake_engine import SCRIPTED, write_tandem

SCALE, STREAMS, ROWS = 64, 3, 4
SIZES = {"max-len": 256, "max-rows": ROWS, "kv-tokens": 1024, "max-step-tokens": 260}
FLAGS = ["--device", "cpu", "--threads", "1", *(word for name, n in SIZES.items() for word in (f"--{name}", str(n)))]
STATIC, *_, PREFIX = matrix(SCALE)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", [STATIC, PREFIX], ids=lambda configuration: configuration.name)
def test_a_short_benchmark_matrix_completes_on_a_cpu(configuration: Configuration, tmp_path: Path) -> None:
    check_matrix(configuration, tmp_path)
    assert Server([], tmp_path / "log").settings()["max_rows"] == ROWS


def test_the_settings_of_a_real_engine_are_read_from_its_log(serving: Serving) -> None:
    settings = Server([], serving.log).settings()
    assert settings["max_len"] == 2048 and settings["device"] == "cpu"


def test_a_short_benchmark_matrix_completes_with_a_scripted_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (Script(200.0).environment() | {"PYTHONPATH": write_tandem(tmp_path, SCRIPTED)}).items():
        monkeypatch.setenv(name, value)
    check_matrix(PREFIX, tmp_path)


def check_matrix(configuration: Configuration, tmp_path: Path) -> None:
    _, two, cold, warm = scenarios(SCALE, STREAMS, 1)
    with Clients(1) as clients, Clients(1) as others:
        bench = Bench("tandem-default", 0, 1e6, clients, others)
        with Server([*FLAGS, *configuration.flags], tmp_path / "log") as server:
            for load in (two, cold, replace(warm, priorities=(0, 1, 2))):
                found = bench.trial(server, load, 0)
                assert (found.completed, found.errors, found.starved) == (STREAMS, 0, 0)
                assert found.output_tokens_per_s > 0
                assert found.ttft.keys() == {"p50", "p95", "p99"}
                assert found.queue_wait.keys() == {"mean", "p50", "p95", "p99"}
            assert list(found.ttft_by_priority) == [0, 1, 2]
            held = bench.held(server, replace(two, streams=4 * ROWS, requests=2), 1)
            assert held["peak"] <= ROWS and held["output_tokens_per_s"] > 0

            def is_overlapped() -> bool:
                """Tell whether the prompts arrived while the streams ran: a busy machine may begin them too late."""
                found = bench.long_prompts(server, LongPrompts(2, 60, 100, 2), 0)
                assert found.prompts == 2 and found.alone["count"] > 0 and found.prompt_ttft["count"] == 2
                assert found.loaded["count"] <= 2 * 59, "gaps of two streams"
                return found.loaded["count"] > 0

            until(is_overlapped, "prompts within streams")
        with pytest.raises(ConnectionError, match="requests failed"):
            bench.held(server, two, 2)
