"""The figures of constrained output, and which requests of a load ask for a schema."""

import json
import random
import re

import pytest

from benchmarks import bench_constrained
from benchmarks.bench_constrained import Cell, ConstrainedDialect, cells, losses, measure_grammar, measure_rounds
from benchmarks.measuring.grammars import ENDLESS, SCHEMAS
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import new_stats
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.workloads import Request, Span, Workload
from tests.fakes.clock import FakeClock
from tests.fakes.completions_server import CompletionsServer
from tests.fakes.http_server import Answer, scripted_server
from tests.support.engine_metrics import metrics_after
from tests.support.refusals import numbers_in


def requests(count: int) -> list[Request]:
    workload = Workload(0, Span(4, 9), Span(8, 8), Span(100, 1000))
    return [workload.request("x", index) for index in range(count)]


def test_shares_of_0_and_100_constrain_none_and_all() -> None:
    plain = Dialect("m", 1.0)
    none, all_of_them = (ConstrainedDialect("m", 1.0, share=share, schema=SCHEMAS["flat record"]) for share in (0, 100))
    for request in requests(20):
        assert none.body(request) == plain.body(request)
        body = json.loads(all_of_them.body(request))
        assert body.pop("response_format")["json_schema"]["schema"] == SCHEMAS["flat record"]
        assert body == json.loads(plain.body(request))


def test_constrained_requests_are_chosen_by_their_prompts() -> None:
    dialect = ConstrainedDialect("m", 1.0, share=20, schema={})
    asked = [b"response_format" in dialect.body(request) for request in requests(2000)]
    assert 300 < sum(asked) < 500
    assert asked == [b"response_format" in dialect.body(request) for request in requests(2000)]


@pytest.mark.parametrize("schema", ["flat record", "recursive tree"])
def test_measure_grammar_times_compilation_and_masks(schema: str) -> None:
    grammars = Grammars(DEFAULT_MODEL / "tokenizer.json", 4096, (2,))
    mask_builder = MaskBuilder((2,), new_stats(), FakeClock())
    found = measure_grammar(grammars, mask_builder, SCHEMAS[schema], random.Random(1))
    assert found["compile_ms"] > 0
    assert 0 < found["mask_us"]["p50"] <= found["mask_us"]["p99"]
    assert found["draft_masks_us"]["count"] > bench_constrained.WALKS
    assert 0 < found["draft_masks_us"]["p50"] <= found["draft_masks_us"]["p99"]
    assert found["masks"] == mask_builder.stats.mask_rows > bench_constrained.WALKS


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_grammars_never_complete(name: str) -> None:
    grammars = Grammars(DEFAULT_MODEL / "tokenizer.json", 4096, (2,))
    mask_builder = MaskBuilder((2,), new_stats(), FakeClock())
    most = bench_constrained.WALKS * bench_constrained.LONGEST_WALK
    assert measure_grammar(grammars, mask_builder, ENDLESS[name], random.Random(2))["masks"] == most


class TestRounds:
    """Loads in turns, and the losses between them."""

    def test_cells_of_a_group_begin_without_a_schema(self) -> None:
        assert cells(64, ["text", "records"], [0, 20, 100]) == [
            Cell(64, "text", 0),
            Cell(64, "text", 20),
            Cell(64, "text", 100),
            Cell(64, "records", 20),
            Cell(64, "records", 100),
        ]

    def test_rounds_alternate_their_order_and_end_in_time(self) -> None:
        clock, order = FakeClock(), []
        groups = [cells(streams, ["text"], [100]) for streams in (4, 8)]

        def measure(cell: Cell, turn: int) -> float:
            clock.advance(2.0)
            order.append((turn, cell.streams, cell.share))
            return 1.0

        found = measure_rounds(measure, groups, rounds=5, seconds=25.0, clock=clock)
        assert len(found) == 3
        assert order[:4] == [(0, 4, 0), (0, 4, 100), (0, 8, 0), (0, 8, 100)]
        assert order[4:8] == [(1, 8, 100), (1, 8, 0), (1, 4, 100), (1, 4, 0)]
        assert len(measure_rounds(measure, groups, rounds=2, seconds=1e3, clock=clock)) == 2
        assert len(measure_rounds(measure, groups, rounds=5, seconds=0.0, clock=clock)) == 1

    def test_loss_is_the_median_of_losses_within_a_round(self) -> None:
        free, text = cells(4, ["text"], [100])
        rounds = [{free: 100.0, text: 90.0}, {free: 50.0, text: 49.0}, {free: 200.0, text: 160.0}]
        found = losses(rounds, [free, text])
        assert found["4 streams, no schema"]["loss_percent"] == 0.0
        assert found["4 streams, text, 100 %"]["loss_percent"] == pytest.approx(10.0)
        assert found["4 streams, text, 100 %"]["output_tokens_per_s"] == 90.0


class TestServer:
    """Loads of a running server."""

    def arguments(self, served: CompletionsServer, metrics: str) -> list[str]:
        words = f"--url http://127.0.0.1:{served.port} --metrics {metrics} --model m --streams 2 --requests 2"
        return [*words.split(), "--rounds", "2", "--output", "strings", "--output-len", "6", "--seconds", "60"]

    def test_the_engines_counters_are_told_by_load(
        self, served: CompletionsServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # Read before and after each load: two that warm up, then two and two in the opposite order.
        steps = (0, 50, 50, 90, 100, 110, 110, 140, 140, 150, 150, 160)
        answers = [Answer(200, metrics_after(count, 4 * ((at + 1) // 2)).encode()) for at, count in enumerate(steps)]
        with scripted_server(*answers) as metrics:
            bench_constrained.main(self.arguments(served, f"{metrics.url}/metrics"))
            assert len(metrics.requests) == len(steps)
        assert ["response_format" in body for body in served.bodies[::4]] == [False, True, False, True, True, False]
        *_, free, strings = capsys.readouterr().out.splitlines()
        assert numbers_in(free)[:5] == [2, 64, 0, 1, 2] and "no schema" in free
        assert numbers_in(strings)[:3] == [2, 100, 64] and "strings" in strings
        assert numbers_in(strings)[-3:] == [64, 5, 25]

    def test_counters_without_a_server_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_constrained.main(["--metrics", "http://127.0.0.1:1/metrics"])
        assert re.search(r"--metrics\b.*--url\b", capsys.readouterr().err)
