"""Decode attention with several adjacent queries a row, against its oracle, in float32."""

import pytest
import torch

from tandem.engine_core.kernels.attention import paged_decode as kernel
from tandem.engine_core.kernels.attention.extra_splits import assign_extra_splits
from tandem.engine_core.kernels.attention.paged_decode import MAX_QUERIES, paged_decode
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, empty_quantized_activation
from tandem.engine_core.kernels.reference import attention as reference
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tests.engine_core.kernels.attention.test_early_loads import BLOCK, PIPELINED, TILE, LateWriter
from tests.engine_core.kernels.attention.test_paged_decode import SMALL, Inputs, inputs
from tests.support.thinned import thinned

LENGTHS = [MAX_QUERIES, BLOCK, BLOCK + 1, BLOCK + 5, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK + 6]
"""Positions of a row with all of its queries: their edges are at and next to those of blocks."""


def several(given: Inputs, queries: int, live: list[int] | None = None) -> Inputs:
    """Give each row adjacent queries, of which the last is at the row's position.

    live: number of the queries of each row with a position of their own; the others repeat the last. None: all.
    """
    last, batch, device = given.positions.long(), len(given.rows), given.query.device
    own = torch.tensor(live or [queries] * batch, device=device).unsqueeze(1)
    number = torch.minimum(torch.arange(queries, device=device).unsqueeze(0), own - 1)
    positions = last.unsqueeze(1) - own + 1 + number
    return given._replace(
        query=torch.randn(batch * queries, *given.query.shape[1:]).to(device),
        rows=given.rows.repeat_interleave(queries),
        positions=positions.flatten().int(),
    )


def assert_equals_the_oracle(
    given: Inputs, queries: int, splits: int, window: int | None = None, softcap: float | None = None
) -> None:
    found = paged_decode(*given, 0.2, splits, window=window, softcap=softcap, tile=SMALL, queries=queries)
    expected = reference.paged_decode(*given, 0.2, window, softcap)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("queries", "splits", "shape"),
    thinned(
        range(2, MAX_QUERIES + 1),
        [1, 3],
        [(4, 2, 32, 4), (3, 1, 64, 16), (14, 2, 64, 16), (2, 2, 96, 8), (6, 1, 32, 1), (2, 1, 256, 32)],
    ),
)
def test_queries_equal_the_oracle(queries: int, splits: int, shape: tuple[int, int, int, int], device: str) -> None:
    heads, kv_heads, head_dim, page_size = shape
    given = inputs([8, 17, 70], heads, kv_heads, head_dim, page_size, device)
    assert_equals_the_oracle(several(given, queries), queries, splits)


@pytest.mark.parametrize(("queries", "splits", "length"), thinned([2, 5, 8], [1, 2, 5], LENGTHS))
def test_queries_across_the_edges_of_blocks_and_splits_equal_the_oracle(
    queries: int, splits: int, length: int, device: str
) -> None:
    """A split may begin behind the first queries: they see none of its keys."""
    given = several(inputs([length], 4, 2, 32, 8, device), queries)
    found = paged_decode(*given, 0.2, splits, tile=SMALL, least=1, queries=queries)
    torch.testing.assert_close(found, reference.paged_decode(*given, 0.2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("queries", "window", "splits"), thinned([2, 8], [1, 2, 8, 15, 16, 17, 33, 200], [1, 3]))
def test_a_window_of_each_query_equals_the_oracle(queries: int, window: int, splits: int, device: str) -> None:
    given = several(inputs(LENGTHS, 4, 2, 32, 8, device), queries)
    assert_equals_the_oracle(given, queries, splits, window)


def test_heads_of_256_with_a_window_and_a_soft_cap_equal_the_oracle(device: str) -> None:
    given = several(inputs([17, 40], 2, 1, 256, 16, device), 4)
    assert_equals_the_oracle(given._replace(query=given.query * 2), 4, 2, 20, 50.0)


@pytest.mark.parametrize("live", [1, 2, 3, 4])
def test_queries_that_repeat_a_position_read_nothing_behind_it(live: int, device: str) -> None:
    """The pool is NaN behind the last position of each row."""
    given = several(inputs([live, 17, 70], 4, 2, 32, 8, device), 4, [live, 4, live])
    assert_equals_the_oracle(given, 4, 2)


def test_padding_rows_stay_finite_and_change_no_other_row(device: str) -> None:
    given = several(inputs([20], 2, 1, 32, 4, device), 3)
    given.keys[:4], given.values[:4] = 0.0, 0.0
    nothing = torch.zeros(3, dtype=torch.int32, device=device)
    given = given._replace(
        query=torch.cat((given.query, torch.randn(3, 2, 32, device=device))),
        rows=torch.cat((given.rows, nothing)),
        positions=torch.cat((given.positions, nothing)),
    )
    found = paged_decode(*given, 0.2, 2, tile=SMALL, queries=3)
    assert found.isfinite().all()
    torch.testing.assert_close(found, reference.paged_decode(*given, 0.2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_an_earlier_query_does_not_depend_on_the_key_of_a_later_one(splits: int, device: str) -> None:
    """Its token may be a wrong draft. A later query sees the key, NaN included."""
    given = several(inputs([16, 50, 70], 4, 2, 32, 8, device), 4)
    expected = paged_decode(*given, 0.2, splits, tile=SMALL, queries=4)
    third = slice(2, None, 4)
    slots = given.page_table.slots(given.rows[third].long(), given.positions[third].long())
    given.keys[slots], given.values[slots] = torch.nan, 0.0
    found = paged_decode(*given, 0.2, splits, tile=SMALL, queries=4).view(3, 4, -1)
    torch.testing.assert_close(found[:, :2], expected.view(3, 4, -1)[:, :2], atol=1e-6, rtol=1e-6)
    assert found[:, 2:].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_pool_of_8_bit_floats_is_read_exactly(splits: int, device: str) -> None:
    given = several(inputs([8, 16, 70], 4, 2, 32, 8, device), 4)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (given.keys, given.values))
    scales = torch.tensor((0.02, 30.0), device=device)
    stored = given._replace(query=given.query * 0.02, keys=keys, values=values)
    found = paged_decode(*stored, 0.2, splits, tile=SMALL, scales=scales, queries=4)
    meant = given._replace(keys=keys.float() * 0.02, values=values.float() * 30.0)
    torch.testing.assert_close(found, reference.paged_decode(*meant, 0.2), atol=6e-4, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_extra_splits_follow_the_last_query_and_change_no_result(
    window: int | None, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("tandem.engine_core.kernels.attention.extra_splits.BALANCE", 32)
    given = several(inputs([66, 8, 200], 4, 2, 32, 8, device), 4)
    extra_splits = assign_extra_splits(given.positions, 2, 6, queries=4)
    assert extra_splits is not None and extra_splits.plan[3:6].tolist() == [1, 0, 5]
    expected = reference.paged_decode(*given, 0.2, window)
    for _ in range(2):  # The second launch finds its counters at zero.
        found = paged_decode(*given, 0.2, 2, window=window, tile=SMALL, least=16, extra_splits=extra_splits, queries=4)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_one_query_a_row_gives_the_same_bits_as_without_the_argument(device: str) -> None:
    given = inputs([8, 17, 70], 4, 2, 32, 8, device)
    assert torch.equal(paged_decode(*given, 0.2, 2, tile=SMALL, queries=1), paged_decode(*given, 0.2, 2, tile=SMALL))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
@pytest.mark.parametrize(
    ("queries", "length", "splits", "tile"), thinned([2, 4, 8], LENGTHS, [1, 3], [TILE, PIPELINED])
)
def test_early_loads_stop_before_the_first_new_position(
    queries: int, length: int, splits: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = LateWriter(several(inputs([length], 4, 2, 32, 8, "cpu"), queries))
    monkeypatch.setattr(kernel, "wait_for_previous", before.wait)
    monkeypatch.setattr(kernel, "split_blocks", before.begin)
    found = paged_decode(*before.shown, 0.2, splits, tile=tile, least=BLOCK, early=True, queries=queries)
    if splits == 1:
        # The interpreter has no pipeline; on a GPU its prologue comes before the wait in the loop.
        reaches_newest = tile.stages * BLOCK > length - queries or length <= tile.stages * BLOCK
        assert before.waits == 2 * (1 + reaches_newest)
    torch.testing.assert_close(found, reference.paged_decode(*before.given, 0.2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_outputs_quantized_by_head_have_the_scale_of_their_token(splits: int, device: str) -> None:
    given = several(inputs([8, 70], 4, 2, 32, 8, device), 3)
    expected = paged_decode(*given, 0.2, splits, tile=SMALL, queries=3)
    to = ActivationFormat(torch.int8, 32)
    quantized = empty_quantized_activation(6, 128, torch.float32, to, torch.device(device))
    paged_decode(*given, 0.2, splits, tile=SMALL, queries=3, quantized=quantized)
    scales = quantized.scales[:6]
    found = quantized.values[:6].view(6, 4, 32) * scales.unsqueeze(2)
    torch.testing.assert_close(scales, expected.abs().amax(2) / 127, atol=1e-6, rtol=1e-4)
    assert ((found - expected).abs() <= scales.unsqueeze(2) * 0.51).all()


def test_the_largest_element_of_each_head_is_stored_with_its_token(device: str) -> None:
    given = several(inputs([8, 70], 4, 2, 32, 8, device), 3)
    amax = torch.zeros(6, 4, device=device)
    found = paged_decode(*given, 0.2, 2, tile=SMALL, queries=3, amax=amax)
    assert torch.equal(amax, found.abs().amax(2))


@pytest.mark.parametrize(("tokens", "queries"), [(4, 0), (4, 3), (18, MAX_QUERIES + 1)])
def test_tokens_that_are_no_rows_of_queries_are_refused(tokens: int, queries: int, device: str) -> None:
    given = inputs([4] * tokens, 2, 1, 32, 4, device)
    with pytest.raises(ValueError, match=rf"^{tokens} tokens\b.*\b{queries} queries"):
        paged_decode(*given, 1.0, 1, queries=queries)


def test_fused_rope_with_several_queries_is_refused(device: str) -> None:
    given = inputs([4, 4], 4, 1, 32, 4, device)
    angles = torch.zeros(2, 1, 32, device=device)
    rotation = Rotation(angles, angles, torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="RoPE"):
        paged_decode(*given, 1.0, 1, queries=2, rotation=rotation)
