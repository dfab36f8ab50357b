"""The Triton decode attention against its oracle, in float32."""

import pytest
import torch

from tandem.engine_core.kernels.attention.paged_decode import Tile, choose_splits, choose_tile, paged_decode
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference import attention as reference

SMALL = Tile(16, 4, 1)


def pool(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, page_size: int, device: str
) -> tuple[torch.Tensor, ...]:
    """query, keys, values, rows, positions, page_table: rows in any order, pages scattered, what no row owns is NaN."""
    count = [-(-length // page_size) for length in lengths]
    free = (torch.randperm(sum(count)) + 1).tolist()
    table = torch.zeros(len(lengths) + 1, max(count), dtype=torch.int32)
    rows = torch.randperm(len(lengths)) + 1
    keys, values = torch.full((2, (sum(count) + 1) * page_size, kv_heads, head_dim), torch.nan).unbind(0)
    for row, length, pages in zip(rows.tolist(), lengths, count, strict=True):
        table[row, :pages] = torch.tensor([free.pop() for _ in range(pages)])
        n = torch.arange(length)
        place = table[row, n // page_size].long() * page_size + n % page_size
        for part in (keys, values):
            part[place] = torch.randn(length, kv_heads, head_dim)
    query = torch.randn(len(lengths), heads, head_dim)
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    return tuple(t.to(device) for t in (query, keys, values, rows.int(), positions, table))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 32, 4), (3, 1, 64, 16), (2, 2, 128, 32), (6, 1, 32, 1)]
)
def test_equals_the_oracle(heads: int, kv_heads: int, head_dim: int, page_size: int, splits: int, device: str) -> None:
    given = pool([1, 16, 17, 70], heads, kv_heads, head_dim, page_size, device)
    found = paged_decode(*given, page_size, 0.2, splits, tile=SMALL)
    expected = reference.paged_decode(*given, page_size, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_launch_leaves_its_counters_at_zero(device: str) -> None:
    given = pool([20, 70], 2, 1, 32, 8, device)
    first = paged_decode(*given, 8, 0.2, 4, tile=SMALL)
    torch.testing.assert_close(paged_decode(*given, 8, 0.2, 4, tile=SMALL), first, atol=1e-6, rtol=1e-6)


def test_short_rows_stay_in_one_program(device: str) -> None:
    given = pool([20, 70], 2, 1, 32, 8, device)
    found = paged_decode(*given, 8, 0.2, 4, tile=SMALL, least=64)
    torch.testing.assert_close(found, reference.paged_decode(*given, 8, 0.2), atol=2e-5, rtol=2e-5)


def test_padding_rows_are_harmless(device: str) -> None:
    query, keys, values, rows, positions, table = pool([20], 2, 1, 32, 4, device)
    keys[:4], values[:4] = 0.0, 0.0
    padded = torch.cat((query, torch.randn(2, 2, 32, device=device)))
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    rows, positions = torch.cat((rows, nothing)), torch.cat((positions, nothing))
    found = paged_decode(padded, keys, values, rows, positions, table, 4, 0.2, 2, tile=SMALL)
    assert found.isfinite().all()
    expected = reference.paged_decode(padded, keys, values, rows, positions, table, 4, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_pool_of_8_bit_floats_is_read_exactly(device: str) -> None:
    query, keys, values, *rest = pool([1, 16, 70], 4, 2, 32, 8, device)
    keys, values = (to_pool(part.nan_to_num(), torch.float8_e4m3fn) for part in (keys, values))
    found = paged_decode(query, keys, values, *rest, 8, 0.2, 3, tile=SMALL)
    expected = reference.paged_decode(query, keys.float(), values.float(), *rest, 8, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 40, 64])
def test_one_page_a_row(length: int, device: str) -> None:
    given = pool([length, 3], 2, 1, 32, 64, device)
    found = paged_decode(*given, 64, 0.2, 2, tile=SMALL)
    torch.testing.assert_close(found, reference.paged_decode(*given, 64, 0.2), atol=2e-5, rtol=2e-5)


def test_large_scores_do_not_overflow(device: str) -> None:
    query, *rest = pool([40], 2, 1, 32, 4, device)
    found = paged_decode(query * 1e3, *rest, 4, 1.0, 4, tile=SMALL)
    torch.testing.assert_close(found, reference.paged_decode(query * 1e3, *rest, 4, 1.0), atol=1e-4, rtol=1e-4)


def test_splits_fill_the_device_and_bound_a_long_row() -> None:
    assert choose_splits(1, 8, 132, 448) == 14
    assert choose_splits(1, 8, 132, 131072) == 33
    assert choose_splits(1, 1, 132, 131072) == 64
    assert choose_splits(8, 8, 132, 448) == 5
    assert choose_splits(64, 8, 132, 448) == 1
    assert choose_splits(256, 8, 132, 131072) == 8
    assert choose_splits(1, 1, 132, 1) == 1


def test_tiles_follow_the_work() -> None:
    tiles = [choose_tile(64, pairs, torch.bfloat16) for pairs in (8, 64, 256, 2048)]
    assert len(set(tiles)) == 4
    assert choose_tile(256, 8, torch.float32).stages == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"splits": 0}, "splits"), ({"splits": 65}, "splits"), ({"page_size": 3}, "pages of 3")],
)
def test_what_is_refused(change: dict[str, int], message: str, device: str) -> None:
    given = pool([4], 2, 1, 32, 4, device)
    with pytest.raises(ValueError, match=message):
        paged_decode(*given, **({"page_size": 4, "scale": 1.0, "splits": 1} | change))
