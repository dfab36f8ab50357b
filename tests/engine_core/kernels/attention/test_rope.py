"""The Triton rotary embedding and KV write against their oracle, in float32."""

import pytest
import torch

from tandem.engine_core.kernels.attention.rope import rope_and_kv_write
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write


def inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, device: str, rotary_dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    """qkv, cos, sin and slot_mapping. The tables are halves of one lookup, as in `RotaryTable`.

    rotary_dim: None for whole heads.
    """
    angles = torch.rand(tokens, (rotary_dim or head_dim) // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device)
    return qkv, table[:, :1], table[:, 1:], torch.randperm(20, device=device)[:tokens]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (4, 2, 32, 32),
        (3, 1, 64, 64),
        (2, 2, 256, 256),
        # Phi-4-mini, and rotated parts of a head that are a power of two, an odd number of pairs, or one pair.
        (3, 1, 128, 96),
        (4, 2, 64, 32),
        (2, 1, 256, 64),
        (4, 2, 32, 22),
        (5, 3, 32, 2),
        (4, 2, 64, 62),
        # Heads that do not fill a tile, as Phi-3-mini's.
        (3, 2, 96, 96),
        (2, 1, 96, 72),
    ],
)
def test_rotation_and_kv_write_equal_the_oracle(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norm: bool, device: str
) -> None:
    given = inputs(3, heads, kv_heads, head_dim, device, rotary_dim)
    weights = tuple(torch.rand(head_dim, device=device) + 0.5 for _ in range(2)) if norm else (None, None)
    pools = [torch.full((2, 20, kv_heads, head_dim), 7.0, device=device) for _ in range(2)]
    query = rope_and_kv_write(*given, *pools[0].unbind(0), *weights, eps=1e-5)
    expected = qk_norm_rope_and_kv_write(*given, *pools[1].unbind(0), *weights, eps=1e-5)
    torch.testing.assert_close(query, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[0], pools[1], atol=1e-5, rtol=1e-5)
    assert (pools[0][:, sorted(set(range(20)) - set(given[3].tolist()))] == 7).all()


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(4, 2, 32, 32), (3, 1, 256, 64), (5, 3, 32, 8)]
)
def test_gates_between_queries_are_left_out(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, isolate: bool, device: str
) -> None:
    qkv, *given = inputs(3, heads, kv_heads, head_dim, device, rotary_dim)
    gates = torch.full((3, heads, head_dim), 7.0, device=device)
    queries = torch.stack((qkv[:, :heads], gates), 2).flatten(1, 2)
    norms = [torch.rand(head_dim, device=device) + 0.5 for _ in range(2)]
    pools = [torch.zeros(2, 20, kv_heads, head_dim, device=device) for _ in range(3)]
    interleaved = torch.cat((queries, qkv[:, heads:]), 1)
    results = [
        call(x, *given, *pool.unbind(0), *norms, isolate=isolate, gated=gated)
        for call, x, pool, gated in (
            (rope_and_kv_write, interleaved, pools[0], True),
            (rope_and_kv_write, qkv, pools[1], False),
            (qk_norm_rope_and_kv_write, interleaved, pools[2], True),
        )
    ]
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[0], pools[1], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(pools[0], pools[2], equal_nan=True, atol=1e-5, rtol=1e-5)


def test_norms_in_float32_round_once(device: str) -> None:
    """Gemma 3 keeps its norm weights, 1 + weight, in float32 with heads of half precision."""
    qkv, cos, sin, index = inputs(3, 4, 2, 64, device)
    weights = [torch.rand(64, device=device) + 0.5 for _ in range(2)]
    # Unrotated, since the interpreter rounds a sum of products unlike torch.
    given = qkv.half(), torch.ones_like(cos), torch.zeros_like(sin), index
    pools = [torch.zeros(2, 20, 2, 64, device=device).half() for _ in range(2)]
    query = rope_and_kv_write(*given, *pools[0].unbind(0), *weights, eps=1e-6)
    expected = qk_norm_rope_and_kv_write(*given, *pools[1].unbind(0), *weights, eps=1e-6)
    torch.testing.assert_close(query, expected, atol=1e-6, rtol=2**-10)
    torch.testing.assert_close(pools[0], pools[1], atol=1e-6, rtol=2**-10)
    # Rounding twice would change more than a tenth of them.
    assert (query == expected).float().mean() > 0.98


def test_a_pool_of_8_bit_floats_equals_the_oracle(device: str) -> None:
    """Only values that such a pool represents exactly, unrotated, since the interpreter rounds unlike a GPU; and larger
    ones, which are clamped."""
    qkv, cos, sin, index = inputs(5, 4, 2, 32, device)
    qkv = to_pool(qkv * 3, torch.float8_e4m3fn).float()
    qkv[0, -1, :2] = torch.tensor([1000.0, -1e30])
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    pools = [torch.zeros(2, 20, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    rope_and_kv_write(qkv, cos, sin, index, *pools[0].unbind(0))
    qk_norm_rope_and_kv_write(qkv, cos, sin, index, *pools[1].unbind(0))
    found, expected = (pool.float() for pool in pools)
    assert torch.equal(found, expected)
    assert torch.equal(expected[:, index], qkv.unflatten(1, (4, 2))[:, 2:].transpose(0, 1).clamp(-448, 448))


@pytest.mark.parametrize("pair", [(0.25, 8.0), (4096.0, 2.0**-6), (3.0, 0.75)])
def test_scales_divide_keys_and_values_and_multiply_queries(pair: tuple[float, float], device: str) -> None:
    """Keys beyond the largest 8-bit float are stored unclamped with a scale; values as in the test above."""
    qkv, cos, sin, index = inputs(5, 4, 2, 32, device)
    qkv = to_pool(qkv * 3, torch.float8_e4m3fn).float()
    qkv[:, 4:6] *= pair[0]
    qkv[:, 6:] *= pair[1]
    qkv[0, -1, :2] = torch.tensor([1000.0 * pair[1], -1e30])
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    scales = torch.tensor(pair, device=device)
    pools = [torch.zeros(2, 20, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    query = rope_and_kv_write(qkv, cos, sin, index, *pools[0].unbind(0), scales=scales)
    expected = qk_norm_rope_and_kv_write(qkv, cos, sin, index, *pools[1].unbind(0), scales=scales)
    torch.testing.assert_close(query, expected)
    torch.testing.assert_close(expected, qkv[:, :4] * pair[0])
    found, oracle = (pool.float() for pool in pools)
    assert torch.equal(found, oracle)
    stored = oracle[:, index].transpose(0, 1).flatten(1, 2)
    meant = torch.cat((qkv[:, 4:6] / pair[0], qkv[:, 6:] / pair[1]), 1)
    assert torch.equal(stored, meant.clamp(-448, 448))
    assert (stored[0, -1, 0], stored[0, -1, 1]) == (448, -448)


def test_a_strided_pool_and_strided_tokens_equal_the_oracle(device: str) -> None:
    qkv, cos, sin, index = inputs(2, 2, 1, 32, device)
    wide = torch.randn(2, 6, 32, device=device)
    wide[:, :4] = qkv
    keys, values = torch.zeros(20, 2, 1, 32, device=device).unbind(1)
    other = torch.zeros(2, 20, 1, 32, device=device)
    query = rope_and_kv_write(wide[:, :4], cos, sin, index, keys, values)
    torch.testing.assert_close(query, qk_norm_rope_and_kv_write(qkv, cos, sin, index, other[0], other[1]))
    torch.testing.assert_close(torch.stack((keys, values)), other)


def test_shapes_without_a_kernel_are_refused(device: str) -> None:
    pool = torch.zeros(20, 1, 48, device=device)
    with pytest.raises(ValueError, match="head_dim"):
        rope_and_kv_write(*inputs(1, 2, 1, 48, device), pool, pool)
    pool = torch.zeros(20, 1, 32, device=device)
    qkv, cos, sin, index = inputs(1, 2, 1, 32, device, 34)
    for tables in ((cos, sin), (cos[:, :, :31], sin[:, :, :31]), (cos[:, :, :30], sin[:, :, :32])):
        with pytest.raises(ValueError, match=rf"\b{tables[0].shape[-1]} cos.*\b{tables[1].shape[-1]} sin"):
            rope_and_kv_write(qkv, *tables, index, pool, pool)
    with pytest.raises(ValueError, match="norms"):
        rope_and_kv_write(*inputs(1, 2, 1, 32, device), pool, pool, torch.ones(32, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        rope_and_kv_write(*inputs(1, 2, 1, 32, device), pool[:, :, :16], pool[:, :, :16])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_an_isolated_token_stores_zeros_for_invalid_values_and_nan_for_their_key(
    kv_dtype: torch.dtype, device: str
) -> None:
    """Of heads in the same program as their keys, and in another one. 8-bit floats clamp infinity."""
    qkv, cos, sin, index = inputs(3, 40, 10, 32, device)
    qkv = to_pool(qkv, torch.float8_e4m3fn).float()
    qkv[0, -10, 3], qkv[1, -1, 31], qkv[1, -5, 0] = torch.nan, torch.inf, -torch.inf
    plain = torch.ones_like(cos), torch.zeros_like(sin)
    pools = [torch.zeros(2, 20, 10, 32, device=device).to(kv_dtype) for _ in range(2)]
    rope_and_kv_write(qkv, *plain, index, *pools[0].unbind(0), isolate=True)
    qk_norm_rope_and_kv_write(qkv, *plain, index, *pools[1].unbind(0), isolate=True)
    found, expected = (pool.float() for pool in pools)
    torch.testing.assert_close(found, expected, equal_nan=True)
    keys, values = found[:, index].unbind(0)
    assert values.isfinite().all()
    broken = [(0, 0)] if kv_dtype.itemsize == 1 else [(0, 0), (1, 5), (1, 9)]
    assert keys.isnan().any(-1).nonzero().tolist() == [list(pair) for pair in broken]
    assert keys[0, 0].isnan().all() and values[0, 0, 3] == 0
