"""Decode attention with fused RoPE, against RoPE and attention in sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.attention import paged_decode as kernel
from tandem.engine_core.kernels.attention.extra_splits import assign_extra_splits
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference import attention as reference
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tests.engine_core.kernels.attention.test_paged_decode import Inputs, inputs
from tests.support.thinned import thinned

BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 70]
"""The newest position is alone, alone in its block, the last of one, or in the middle."""
TILES = [Tile(BLOCK, 4, 1), Tile(BLOCK, 4, 3)]


def rotation_of(given: Inputs, rotary_dim: int, norm: bool = False) -> Rotation:
    """The rotation of the newest position of each row, with tables as in `RotaryTable`."""
    device, head_dim = given.keys.device, given.keys.shape[2]
    angles = torch.rand(len(given.rows), rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(device)
    slots = given.page_table.slots(given.rows.long(), given.positions.long())
    norms = tuple(torch.rand(head_dim, device=device) + 0.5 for _ in range(2)) if norm else (None, None)
    return Rotation(table[:, :1], table[:, 1:], slots, *norms, 1e-5)


def projected(given: Inputs, heads: int) -> Tensor:
    rows, (_, kv_heads, head_dim) = len(given.rows), given.keys.shape
    return torch.randn(rows, heads + 2 * kv_heads, head_dim, device=given.keys.device)


def forget_newest(given: Inputs, rotation: Rotation) -> None:
    """Put NaN in the slots of the newest keys and values."""
    for part in (given.keys, given.values):
        part[rotation.slot_mapping] = torch.nan


def expected(
    qkv: Tensor, given: Inputs, rotation: Rotation, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention's result and the whole pool, by the oracles."""
    keys, values = given.keys.clone(), given.values.clone()
    query = qk_norm_rope_and_kv_write(qkv, *rotation[:3], keys, values, *rotation[3:])
    return reference.paged_decode(query, keys, values, *given[3:], 0.2, window, softcap), keys, values


def assert_equals_the_oracles(qkv: Tensor, given: Inputs, rotation: Rotation, splits: int, **options: Any) -> None:
    window, softcap = options.get("window"), options.get("softcap")
    forget_newest(given, rotation)
    wanted, keys, values = expected(qkv, given, rotation, window, softcap)
    found = paged_decode(qkv, *given[1:], 0.2, splits, least=BLOCK, rotation=rotation, **options)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(given.keys, keys, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(given.values.nan_to_num(7.0), values.nan_to_num(7.0)), "values are stored as they are"


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norm", "early", "splits"),
    thinned([32, 64, 96], [32, 22, 2], [False, True], [False, True], [1, 3]),
)
def test_heads_are_rotated_stored_and_attended_to(
    head_dim: int, rotary_dim: int, norm: bool, early: bool, splits: int, device: str
) -> None:
    """Whole heads are rotated, or a part whose length is no power of two; heads fill a tile or do not."""
    given = inputs(LENGTHS, 4, 2, head_dim, 8, device)
    rotation = rotation_of(given, rotary_dim, norm)
    assert_equals_the_oracles(projected(given, 4), given, rotation, splits, tile=TILES[1], early=early)


@pytest.mark.parametrize(("window", "splits", "early"), thinned([1, 2, BLOCK, BLOCK + 1, 40], [1, 3], [False, True]))
def test_the_newest_token_is_in_every_window(window: int, splits: int, early: bool, device: str) -> None:
    given = inputs(LENGTHS, 4, 2, 32, 8, device)
    options = {"window": window, "tile": TILES[0], "early": early}
    assert_equals_the_oracles(projected(given, 4), given, rotation_of(given, 32), splits, **options)


def test_a_soft_cap_holds_for_the_newest_score_too(device: str) -> None:
    given = inputs(LENGTHS, 4, 2, 32, 8, device)
    assert_equals_the_oracles(projected(given, 4) * 5, given, rotation_of(given, 32), 3, softcap=0.5, tile=TILES[0])


def test_a_long_row_with_extra_splits_stores_its_token_once(device: str) -> None:
    given = inputs([200, 1, 33, 70], 4, 2, 96, 8, device)
    extra_splits = assign_extra_splits(given.positions, 2, 6)
    assert_equals_the_oracles(
        projected(given, 4), given, rotation_of(given, 96), 2, tile=TILES[1], extra_splits=extra_splits
    )


def test_heads_of_one_group_and_strided_rows_of_a_projection(device: str) -> None:
    given = inputs([1, 17, 40], 3, 1, 32, 8, device, page_stride=24)
    wide = torch.randn(3, 7, 32, device=device)
    assert_equals_the_oracles(wide[:, :5], given, rotation_of(given, 32), 2, tile=TILES[0])


@pytest.mark.parametrize("early", [False, True])
def test_8_bit_keys_and_values_are_divided_by_their_scales(early: bool, device: str) -> None:
    """Unrotated and with values that such a pool represents exactly, since the interpreter rounds unlike a GPU."""
    given = inputs([1, 16, 17, 70], 4, 2, 32, 8, device)
    rotation = rotation_of(given, 32)
    rotation = rotation._replace(cos=torch.ones_like(rotation.cos), sin=torch.zeros_like(rotation.sin))
    scales = torch.tensor([0.25, 4.0], device=device)
    qkv = to_pool(projected(given, 4), torch.float8_e4m3fn).float()
    qkv[:, 4:6] *= scales[0]
    qkv[:, 6:] *= scales[1]
    pools = [to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in given[1:3]]
    exact = [part.clone() for part in pools]
    query = qk_norm_rope_and_kv_write(qkv, *rotation[:3], *exact, scales=scales)
    wide = [part.float() * scale for part, scale in zip(exact, scales, strict=True)]
    wanted = reference.paged_decode(query / scales[0], *wide, *given[3:], 0.2)
    found = paged_decode(
        *(qkv, *pools, *given[3:], 0.2, 3),
        tile=TILES[1],
        least=BLOCK,
        early=early,
        scales=scales,
        rotation=rotation,
    )
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    for part, stored in zip(pools, exact, strict=True):
        assert torch.equal(part.float(), stored.float())


def test_keys_are_normalized_in_float32_and_rounded_once(device: str) -> None:
    """Gemma 3 keeps its norm weights in float32. Unrotated, as the interpreter rounds sums unlike torch."""
    given = inputs([5, 17, 40], 4, 2, 64, 8, device)
    rotation = rotation_of(given, 64, norm=True)
    rotation = rotation._replace(cos=torch.ones_like(rotation.cos), sin=torch.zeros_like(rotation.sin))
    given = given._replace(keys=given.keys.nan_to_num().half(), values=given.values.nan_to_num().half())
    qkv = projected(given, 4).half()
    _, keys, values = expected(qkv, given, rotation)
    paged_decode(qkv, *given[1:], 0.2, 1, tile=TILES[0], rotation=rotation)
    slots = rotation.slot_mapping
    torch.testing.assert_close(given.keys[slots], keys[slots], atol=1e-6, rtol=2**-10)
    # Rounding twice would change more than a tenth of them.
    assert (given.keys[slots] == keys[slots]).float().mean() > 0.98
    assert torch.equal(given.values[slots], values[slots])


class LateProduct:
    """A preceding kernel that writes the projection as late as possible.

    Until a program waits it finds NaN there, and always in the slots of the newest tokens.
    """

    def __init__(self, qkv: Tensor) -> None:
        self.qkv = qkv
        self.shown = torch.full_like(qkv, torch.nan)
        self.waits = 0

    def wait(self, _pdl: Any, _hold: Any) -> None:
        """Stand in for `wait_for_previous`."""
        self.waits += 1
        self.shown.copy_(self.qkv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
@pytest.mark.parametrize(("early", "length", "tile"), thinned([False, True], LENGTHS, TILES))
def test_a_program_waits_once_and_before_it_reads_the_projection(
    early: bool, length: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs([length], 4, 1, 32, 8, "cpu")
    rotation = rotation_of(given, 32)
    before = LateProduct(projected(given, 4))
    monkeypatch.setattr(kernel, "wait_for_previous", before.wait)
    forget_newest(given, rotation)
    wanted, _, _ = expected(before.qkv, given, rotation)
    found = paged_decode(before.shown, *given[1:], 0.2, 1, tile=tile, early=early, rotation=rotation)
    assert before.waits == 1
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_tables_and_norms_that_do_not_fit_are_refused(device: str) -> None:
    given = inputs([5], 4, 2, 32, 8, device)
    qkv, rotation = projected(given, 4), rotation_of(given, 32, norm=True)
    for wrong, message in (
        (rotation._replace(k_norm=None), "both be given, or neither"),
        (rotation._replace(sin=rotation.sin[:, :, :30]), "tables of 32 cosines and 30 sines"),
        (rotation._replace(cos=rotation.cos[:, :, ::2], sin=rotation.sin[:, :, ::2]), "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_decode(qkv, *given[1:], 0.2, 1, rotation=wrong)
