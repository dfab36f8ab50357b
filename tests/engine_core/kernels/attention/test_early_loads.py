"""Decode attention with early loads of keys and values, against its oracle."""

from typing import Any

import pytest
import torch

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.attention import paged_decode as kernel
from tandem.engine_core.kernels.attention.extra_splits import assign_extra_splits
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.split_blocks import split_blocks
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference import attention as reference
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tests.engine_core.kernels.attention.test_paged_decode import Inputs, inputs
from tests.support.thinned import thinned

BLOCK, KV_HEADS = 16, 2
TILE, PIPELINED = Tile(BLOCK, 4, 1), Tile(BLOCK, 4, 3)
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK + 6]
"""At the edges of the blocks that are read early, of tiles with one stage and with three."""


@pytest.mark.parametrize(
    ("splits", "window", "tile"), thinned([1, 3], [None, 1, BLOCK, BLOCK + 1, 40], [TILE, PIPELINED])
)
def test_early_loads_equal_the_oracle(splits: int, window: int | None, tile: Tile, device: str) -> None:
    given = inputs(LENGTHS, 4, 2, 32, 8, device)
    found = paged_decode(*given, 0.2, splits, window=window, tile=tile, least=BLOCK, early=True)
    torch.testing.assert_close(found, reference.paged_decode(*given, 0.2, window), atol=2e-5, rtol=2e-5)


def test_early_loads_change_no_bit(device: str) -> None:
    """With a head size that is no power of two, a soft cap, and extra splits."""
    given = inputs([200, 1, 33, 70], 4, 2, 96, 8, device)
    extra_splits = assign_extra_splits(given.positions, 2, 6)
    expected, found = (
        paged_decode(*given, 0.2, 2, softcap=3.0, tile=PIPELINED, least=BLOCK, extra_splits=extra_splits, early=each)
        for each in (False, True)
    )
    assert torch.equal(found, expected)


def test_early_loads_of_8_bit_floats_change_no_bit(device: str) -> None:
    given = inputs([1, 16, 17, 70], 4, 2, 32, 8, device)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (given.keys, given.values))
    stored = given._replace(query=given.query.bfloat16(), keys=keys, values=values)
    scales = torch.tensor((0.5, 2.0), device=device)
    expected, found = (
        paged_decode(*stored, 0.2, 3, tile=PIPELINED, scales=scales, early=each) for each in (False, True)
    )
    assert torch.equal(found, expected)


class LateWriter:
    """A preceding kernel that writes the query and the newest keys and values as late as possible.

    Each program finds NaN there until it waits.
    """

    def __init__(self, given: Inputs) -> None:
        self.given = given
        self.newest = given.page_table.slots(given.rows.long(), given.positions.long())
        self.shown = given._replace(query=given.query.clone(), keys=given.keys.clone(), values=given.values.clone())
        self.waits = 0

    def begin(self, *blocks: Any) -> Any:
        """Stand in for `split_blocks`, with which a program begins."""
        self.shown.query.fill_(torch.nan)
        for part in (self.shown.keys, self.shown.values):
            part[self.newest] = torch.nan
        return split_blocks(*blocks)

    def wait(self, _pdl: Any, _hold: Any) -> None:
        """Stand in for `wait_for_previous`."""
        self.waits += 1
        self.shown.query.copy_(self.given.query)
        for part, written in ((self.shown.keys, self.given.keys), (self.shown.values, self.given.values)):
            part[self.newest] = written[self.newest]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
@pytest.mark.parametrize(
    ("early", "length", "splits", "tile"), thinned([False, True], LENGTHS, [1, 3], [TILE, PIPELINED])
)
def test_a_program_waits_before_it_reads_what_the_kernel_before_writes(
    early: bool, length: int, splits: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = LateWriter(inputs([length], 4, KV_HEADS, 32, 8, "cpu"))
    monkeypatch.setattr(kernel, "wait_for_previous", before.wait)
    monkeypatch.setattr(kernel, "split_blocks", before.begin)
    found = paged_decode(*before.shown, 0.2, splits, tile=tile, least=BLOCK, early=early)
    if early and splits == 1:
        # The interpreter has no pipeline; on a GPU its prologue comes before the wait in the loop.
        reaches_newest = ceil_div(length, BLOCK) <= tile.stages
        assert before.waits == KV_HEADS * (1 + reaches_newest)
    assert before.waits
    torch.testing.assert_close(found, reference.paged_decode(*before.given, 0.2), atol=2e-5, rtol=2e-5)
