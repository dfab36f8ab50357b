"""Durations of steps at start: of graphs by bucket, without graphs by a line through three steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.scheduler.step_costs import StepWork
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.startup.step_timing import (
    TIMED_POSITION,
    attention_share,
    distinct_rows,
    faster_buckets,
    fill_inputs,
    prompts_alone,
    without_outliers,
)
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tests.fakes.mailbox import FakeMailbox

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"


def test_attention_is_reckoned_from_the_sizes_of_a_model() -> None:
    """A position of Llama 3.1 8B is 128 KiB, its weights are 15 GB; a pair is 32 heads of 128, twice, in 32 layers."""
    model = read_config(SHAPES / "llama-3.1-8b")
    layout = KVLayout.of_one_group(
        model.layers,
        page_size=16,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
    )
    share = attention_share(model, layout, 32_768)
    assert share.context == pytest.approx(2**17 / 15.0e9, rel=0.01)
    assert share.pairs == pytest.approx(2 * 32 * 4096 / 7.5e9, rel=0.01)


def test_attention_within_windows_is_reckoned_at_the_longest_sequence() -> None:
    """29 of the 34 layers of Gemma 3 4B have a window of 1,024."""
    model = read_config(SHAPES / "gemma-3-4b")
    layout = KVLayout.of_one_group(
        model.layers, page_size=16, kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=torch.bfloat16
    )
    near, far = attention_share(model, layout, 1024), attention_share(model, layout, 32_768)
    assert far.context / near.context == pytest.approx((5 + 29 / 32) / 34)
    length, window = 32_768, 1024
    pairs = sum(min(position + 1, window) for position in range(length)) / sum(range(length + 1))
    assert far.pairs / near.pairs == pytest.approx((5 + 29 * pairs) / 34, rel=1e-3)


def test_without_graphs_durations_grow_with_rows_and_tokens() -> None:
    options = EngineOptions(device="cpu", max_rows=8, kv_tokens=4096, max_step_tokens=48)
    engine = build_engine(options, FakeMailbox(), Status(1, new_stats()))
    costs = engine.scheduler.planner.costs
    assert costs.token_sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    rows = [costs.milliseconds(StepWork(count, 0)) for count in range(1, 9)]
    tokens = [costs.milliseconds(StepWork(0, 0, count)) for count in range(1, 49)]
    assert rows == sorted(rows) and tokens == sorted(tokens)
    assert rows[0] > 0.0 and tokens[0] > 0.0
    engine.compiler.close()


def test_rows_with_states_are_timed_apart() -> None:
    """Of 16 decode rows one writes its base; prompts have rows of their own as long as there are some."""
    rows, positions = distinct_rows(GraphBucket(32, 0), 64, 512)
    assert rows == list(range(1, 33))
    assert sum(position % 16 == 0 for position in positions) == 2 and min(positions) > 0
    rows, positions = distinct_rows(GraphBucket(2, 7), 8, 3)
    assert rows == [1, 2, 3, 3, 3, 4, 4, 4, 5]
    assert positions == [1, 1, 0, 1, 2, 0, 1, 2, 0]


def test_rows_of_decode_steps_are_timed_at_a_position() -> None:
    """Steps with prompts keep padding at position 0."""
    found = {}
    for bucket, max_len in ((GraphBucket(2, 0), 512), (GraphBucket(2, 0), 8), (GraphBucket(1, 2), 512)):
        inputs = torch.full((8,), 7, dtype=torch.int32)
        runtime: Any = SimpleNamespace(
            slots=[SimpleNamespace(device_inputs=inputs)],
            tables=SimpleNamespace(tokens=torch.zeros(4, max_len)),
            kv=SimpleNamespace(recurrent=()),
        )
        fill_inputs(runtime, bucket)
        found[bucket, max_len] = inputs.tolist()
    assert found[GraphBucket(2, 0), 512] == [0, 0, TIMED_POSITION, TIMED_POSITION, 0, 0, 0, 0]
    assert found[GraphBucket(2, 0), 8] == [0, 0, 6, 6, 0, 0, 0, 0]
    assert found[GraphBucket(1, 2), 512] == [0] * 8


def test_a_step_that_was_held_up_counts_as_the_next_larger_one() -> None:
    measured = {(1, 0): 1.0, (8, 0): 9.0, (16, 0): 2.0, (0, 64): 3.0, (0, 128): 2.5, (16, 64): 8.0, (16, 128): 6.0}
    expected = measured | {(8, 0): 2.0, (0, 64): 2.5, (16, 64): 6.0}
    assert without_outliers(measured) == expected


def test_a_graph_gives_way_to_a_larger_one_that_is_clearly_faster() -> None:
    """cuBLAS takes longer for 448 positions than for 512 of the 8B on an H200."""
    measured = {
        GraphBucket(64, 256): 8.1, GraphBucket(64, 384): 14.5, GraphBucket(128, 256): 9.2, GraphBucket(128, 384): 11.0,
        GraphBucket(64, 512): 13.6, GraphBucket(48, 0): 4.7, GraphBucket(64, 0): 4.6, GraphBucket(96, 0): 2.0,
    }  # fmt: skip
    assert faster_buckets(measured) == {
        GraphBucket(64, 384): GraphBucket(128, 384),
        GraphBucket(48, 0): GraphBucket(96, 0),
        GraphBucket(64, 0): GraphBucket(96, 0),
    }


@given(
    st.dictionaries(
        st.builds(GraphBucket, st.integers(0, 4), st.integers(0, 4)), st.floats(0.1, 9.0), min_size=1, max_size=20
    )
)
def test_a_step_fits_the_graph_that_it_is_given_and_none_is_passed_on(measured: dict[GraphBucket, float]) -> None:
    faster = faster_buckets(measured)
    for bucket, other in faster.items():
        assert other.num_decode_tokens >= bucket.num_decode_tokens
        assert other.num_prefill_tokens >= bucket.num_prefill_tokens
        assert bool(other.num_prefill_tokens) == bool(bucket.num_prefill_tokens)
        assert measured[other] < measured[bucket]
        assert other not in faster, "a chain of graphs would end at one that is not replaced"


@pytest.mark.parametrize(
    ("positions", "milliseconds"),
    [(1, 3.0), (64, 3.0), (96, 4.0), (128, 5.0), (192, 15.0), (256, 25.0), (257, 0.0)],
)
def test_prompts_alone_lie_between_the_sizes_that_were_timed(positions: int, milliseconds: float) -> None:
    timed = {(1, 0): 1.0, (0, 64): 3.0, (0, 128): 5.0, (0, 256): 25.0, (32, 64): 7.0}
    assert prompts_alone(timed, positions) == milliseconds


@pytest.mark.parametrize(("positions", "milliseconds"), [(64, 5.0), (96, 5.0), (192, 5.5), (384, 15.5), (512, 25.0)])
def test_a_step_that_was_held_up_makes_no_prompts_alone_take_longer(positions: int, milliseconds: float) -> None:
    timed = {(0, 64): 90.0, (0, 128): 5.0, (0, 256): 70.0, (0, 320): 6.0, (0, 448): 25.0, (0, 512): 25.0}
    assert prompts_alone(timed, positions) == milliseconds


def test_of_no_size_prompts_alone_are_expected_to_take_nothing() -> None:
    assert prompts_alone({(1, 0): 1.0}, 64) == 0.0
