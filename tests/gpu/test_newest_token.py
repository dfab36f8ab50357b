"""Decode attention with fused RoPE, compiled, against separate rotation and attention."""

from itertools import product

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.reference import attention as reference_attention
from tandem.engine_core.kernels.reference.layer import qk_norm_rope_and_kv_write
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tests.gpu.test_kernels_decode import STEP, Paged, paged, randn

pytestmark = pytest.mark.gpu

LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 448, 1000, 4097]
FP8 = torch.float8_e4m3fn


def rotation_for(given: Paged, head_dim: int, rotary_dim: int, norm: bool, dtype: torch.dtype) -> Rotation:
    angles = torch.rand(len(given.rows), rotary_dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    slots = given.page_table.slots(given.rows.long(), given.positions.long())
    norms = tuple(torch.rand(head_dim, device="cuda").to(dtype) + 0.5 for _ in range(2)) if norm else (None, None)
    return Rotation(table[:, :1], table[:, 1:], slots, *norms, 1e-5)


def expected(qkv: Tensor, given: Paged, rotation: Rotation, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of attention, and the new keys and values, in float32."""
    wide = [t.float() for t in (given.keys, given.values)]
    norms = (None if norm is None else norm.float() for norm in rotation[3:5])
    query = qk_norm_rope_and_kv_write(qkv.float(), *rotation[:3], *wide, *norms, rotation.eps)
    slots = rotation.slot_mapping
    for part in wide:
        part[slots] = part[slots].to(qkv.dtype).float()
    attended = reference_attention.paged_decode(query, *wide, *given[3:], given.keys.shape[2] ** -0.5, window)
    return attended, wide[0][slots], wide[1][slots]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "norm", "dtype"),
    [
        (32, 8, 64, 64, False, torch.bfloat16),
        (32, 8, 128, 128, False, torch.bfloat16),
        (32, 8, 128, 128, True, torch.float16),
        (24, 8, 128, 96, False, torch.bfloat16),
        (8, 4, 256, 256, True, torch.bfloat16),
        (6, 2, 96, 96, False, torch.float16),
    ],
)
def test_attention_that_rotates_equals_the_oracles(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norm: bool, dtype: torch.dtype, early: bool
) -> None:
    tiles = [Tile(32, 1, 3), Tile(32, 4, 2)] if head_dim < 256 else [Tile(16, 2, 3)]
    for (splits, window), tile in product([(1, None), (5, None), (3, 70)], tiles):
        given = paged(LENGTHS, heads, kv_heads, head_dim, 16, dtype)
        rotation = rotation_for(given, head_dim, rotary_dim, norm, dtype)
        qkv = randn(len(LENGTHS), heads + 2 * kv_heads, head_dim, dtype=dtype)
        attended, keys, values = expected(qkv, given, rotation, window)
        for part in (given.keys, given.values):
            part[rotation.slot_mapping] = torch.nan
        found = paged_decode(
            *(qkv, *given[1:], head_dim**-0.5, splits),
            window=window,
            tile=tile,
            least=32,
            early=early,
            pdl=True,
            rotation=rotation,
        )
        tolerance = 4 * STEP[dtype]
        torch.testing.assert_close(found.float(), attended, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(given.keys[rotation.slot_mapping].float(), keys, atol=tolerance, rtol=tolerance)
        assert torch.equal(given.values[rotation.slot_mapping].float(), values)


@pytest.mark.parametrize("early", [False, True])
def test_8_bit_keys_and_values_equal_the_oracles(early: bool) -> None:
    """Keys and values equal the oracle's unless RoPE's own rounding crosses a quantization boundary."""
    given = paged(LENGTHS, 32, 8, 128, 16, torch.bfloat16)
    scales = torch.tensor([0.25, 4.0], device="cuda")
    rotation = rotation_for(given, 128, 128, False, torch.bfloat16)
    qkv = randn(len(LENGTHS), 48, 128, dtype=torch.bfloat16)
    pools = [to_pool(part.nan_to_num(), FP8, scale) for part, scale in zip(given[1:3], scales, strict=True)]
    wide = [part.clone() for part in pools]
    query = qk_norm_rope_and_kv_write(qkv, *rotation[:3], *wide, scales=scales)
    read = [part.float() * scale for part, scale in zip(wide, scales, strict=True)]
    exact = reference_attention.paged_decode(query.float() / scales[0], *read, *given[3:], 128**-0.5)
    found = paged_decode(
        *(qkv, *pools, *given[3:], 128**-0.5, 3),
        tile=Tile(32, 1, 3),
        least=32,
        early=early,
        pdl=True,
        scales=scales,
        rotation=rotation,
    )
    torch.testing.assert_close(found.float(), exact, atol=2**-6, rtol=2**-6)
    assert torch.equal(pools[1].float(), wide[1].float())
    keys, stored = pools[0].float(), wide[0].float()
    assert ((keys - stored).abs() <= stored.abs() / 7 + 2.0**-9).all()
    assert (keys != stored)[rotation.slot_mapping].float().mean() < 2e-2


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("batch", "head_dim"), [(1, 128), (1, 64), (64, 128), (64, 64)])
def test_matmuls_and_attention_with_pdl_change_no_bit(batch: int, head_dim: int, early: bool) -> None:
    """Each kernel uses PDL; the newest slots hold NaN until attention has stored them."""
    lengths = [37 + 31 * i for i in range(batch)]
    layers = [paged(lengths, 32, 8, head_dim, 16, torch.bfloat16) for _ in range(4)]
    rotation = rotation_for(layers[0], head_dim, head_dim, False, torch.bfloat16)
    rotations = [
        rotation._replace(slot_mapping=one.page_table.slots(one.rows.long(), one.positions.long())) for one in layers
    ]
    start = randn(batch, 48 * head_dim, dtype=torch.bfloat16)
    weights = [randn(48 * head_dim, 32 * head_dim, dtype=torch.bfloat16) / 64 for _ in layers]

    def chain(pdl: bool) -> Tensor:
        projected = start
        for one, rotated, weight in zip(layers, rotations, weights, strict=True):
            options = {"pdl": pdl, "early": early and pdl, "rotation": rotated, "delay_next": pdl}
            qkv = projected.view(batch, 48, head_dim)
            attended = paged_decode(qkv, *one[1:], head_dim**-0.5, 6, **options)
            projected = attended.flatten(1) @ weight.t()
        return projected

    wanted = chain(False)
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(30):
        for one, rotated in zip(layers, rotations, strict=True):
            one.keys[rotated.slot_mapping], one.values[rotated.slot_mapping] = torch.nan, torch.nan
        graph.replay()
        torch.testing.assert_close(found, wanted, atol=2**-5, rtol=2**-5)
        last = found.clone()
    graph.replay()
    assert torch.equal(found, last)
