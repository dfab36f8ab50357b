"""The figures of constrained output, and which requests of a load ask for a schema."""

import json
import random

import pytest

from benchmarks import bench_constrained
from benchmarks.bench_constrained import ConstrainedDialect, measure_grammar
from benchmarks.measuring.grammars import ENDLESS, SCHEMAS
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import new_stats
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.workloads import Request, Span, Workload
from tests.fakes.clock import FakeClock


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
    mask_builder = MaskBuilder(None, (2,), new_stats(), FakeClock())
    found = measure_grammar(grammars, mask_builder, SCHEMAS[schema], random.Random(1))
    assert found["compile_ms"] > 0
    assert 0 < found["mask_us"]["p50"] <= found["mask_us"]["p99"]
    assert found["masks"] == mask_builder.stats.mask_rows > bench_constrained.WALKS


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_grammars_never_complete(name: str) -> None:
    grammars = Grammars(DEFAULT_MODEL / "tokenizer.json", 4096, (2,))
    mask_builder = MaskBuilder(None, (2,), new_stats(), FakeClock())
    most = bench_constrained.WALKS * bench_constrained.LONGEST_WALK
    assert measure_grammar(grammars, mask_builder, ENDLESS[name], random.Random(2))["masks"] == most
