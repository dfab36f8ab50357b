"""Attention and its output projection, with fused and with separate kernels."""

from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tandem.engine_core.attention import triton as triton_attention
from tandem.engine_core.attention.base import ForwardBatch, LayerAttention
from tandem.engine_core.attention.triton import DecodeStep
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.kernel_set import triton_kernels
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Tile
from tandem.engine_core.layers.attention import attend_and_project
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitLinear
from tandem.engine_core.quantization.scheme import EightBitScheme
from tests.engine_core.kernels.attention.test_newest_token import forget_newest, projected, rotation_of
from tests.engine_core.kernels.attention.test_paged_decode import Inputs, inputs
from tests.engine_core.kernels.linear.test_triton_eight_bit_linear import BLOCKS, INT8, STATIC, linear
from tests.fakes.gpus import L4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and find_spec("triton") is not None:
    from tests.support.interpreter import adapt_interpreter

    adapt_interpreter()

# Rows of a tile beyond the heads are divided too, though not stored.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in divide")

LENGTHS = [1, 16, 17, 70, 40]
PLAN = DecodePlan(Tile(16, 4, 1), 16)
FORMATS = {"static": (STATIC, 4, 2, 64), "blocks": (BLOCKS, 2, 2, 128), "rows": (INT8, 4, 2, 64)}
"""Schemes of the projection, with query heads, KV heads and elements of a head."""


def output_of(scheme: EightBitScheme) -> TritonEightBitLinear:
    found = linear(scheme, L4, 80, DEVICE)
    if found.input_scale is not None:
        # Some values are out of range.
        found.input_scale.fill_(0.003)
    found.find_wide_scales()
    return found


def rotated_exactly(given: Inputs, head_dim: int) -> Rotation:
    """Cosines and sines with exact products, so that all kernels store the same keys."""
    rotation = rotation_of(given, head_dim)
    return rotation._replace(cos=rotation.cos.round(), sin=rotation.sin.round())


def assert_same_result(
    scheme: EightBitScheme, heads: int, kv_heads: int, head_dim: int, lengths: list[int], turns: bool, byte_pool: bool
) -> bool:
    """Compare a step with the same one in separate kernels. Return whether it quantized its result."""
    given = inputs(lengths, heads, kv_heads, head_dim, 16, DEVICE)
    rotation, qkv = rotated_exactly(given, head_dim), projected(given, heads).half()
    forget_newest(given, rotation)
    dtype = torch.float8_e4m3fn if byte_pool else torch.float16
    pools = [to_pool(part.nan_to_num(9.0), dtype) for part in (given.keys, given.values)]
    scales = torch.tensor([0.5, 3.0], device=DEVICE) if byte_pool else None
    output, kernels = output_of(scheme), triton_kernels(pdl=False)
    step = DecodeStep(given.rows, given.positions, [given.page_table], 2, L4)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    rounding = patch.object(DecodeStep, "run_quantized", autospec=True, side_effect=DecodeStep.run_quantized)
    rotating = patch.object(triton_attention, "choose_fused_rope_plan", return_value=PLAN if turns else None)
    with rounding as rounded, rotating:
        for fused in (step, None):
            keys, values = (pool.clone() for pool in pools)
            positions = given.positions.long()
            batch = ForwardBatch(positions, positions, [rotation.slot_mapping], None, step, fused)
            y = attend_and_project(qkv, rotation, batch, keys, values, LayerAttention(0.2), output, kernels, scales)
            found.append((y, keys.float(), values.float()))
    (y, keys, values), (expected, *written) = found
    torch.testing.assert_close(y, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(keys, written[0]) and torch.equal(values, written[1])
    assert not torch.equal(keys, pools[0].float()), "the newest keys are stored"
    assert rounded.call_count <= 1
    return rounded.call_count == 1


@pytest.mark.parametrize("byte_pool", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_a_step_with_fused_quantization_equals_separate_kernels(
    case: tuple[EightBitScheme, int, int, int], turns: bool, byte_pool: bool
) -> None:
    assert assert_same_result(*case, LENGTHS, turns, byte_pool)


@pytest.mark.parametrize("turns", [False, True])
def test_a_step_is_not_quantized_for_16_bit_projections(turns: bool) -> None:
    """As one row does."""
    assert not assert_same_result(*FORMATS["rows"], [40], turns, False)


@pytest.mark.parametrize("turns", [False, True])
def test_heads_that_are_not_groups_are_quantized_after_attention(turns: bool) -> None:
    assert not assert_same_result(BLOCKS, 4, 2, 64, LENGTHS, turns, False)
