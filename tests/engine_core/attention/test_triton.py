"""Launches of decode attention: fused RoPE, output quantization, and delayed dependents."""

from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.attention import triton
from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.triton import DecodeStep
from tandem.engine_core.kernels.attention.rotation import Rotation
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tests.fakes.gpus import H200

PAGES = PageTable(torch.zeros(2, 4, dtype=torch.int32), page_size=16, page_stride=64)


@pytest.mark.parametrize(("heads", "head_dim", "held"), [(32, 64, False), (24, 128, True), (32, 128, True)])
def test_a_wide_matmul_waits_for_the_end_of_attention_but_prompts_overlap_it(
    heads: int, head_dim: int, held: bool
) -> None:
    """Llama 3.2 1B and 3B, and Llama 3.1 8B."""
    rows = torch.zeros(2, dtype=torch.int32)
    query, pool = torch.zeros(2, heads, head_dim).bfloat16(), torch.zeros(64, 8, head_dim).bfloat16()
    step = DecodeStep(rows, rows, [PAGES], 1, H200)
    with patch.object(triton, "paged_decode") as launched:
        step.run(query, pool, pool, LayerAttention(1.0))
        step.run(query, pool, pool, LayerAttention(1.0), out=torch.empty_like(query), scratch=step.scratch(query))
    assert [call.kwargs["delay_next"] for call in launched.call_args_list] == [held, False]


@pytest.mark.parametrize(
    ("rows", "head_dim", "early"), [(8, 64, True), (64, 64, False), (128, 64, True), (8, 128, False)]
)
def test_fused_rope_uses_its_own_plan(rows: int, head_dim: int, early: bool) -> None:
    index = torch.zeros(rows, dtype=torch.int32)
    qkv, pool = torch.zeros(rows, 48, head_dim).bfloat16(), torch.zeros(64, 8, head_dim).bfloat16()
    angles = torch.zeros(rows, 1, head_dim)
    rotation = Rotation(angles, angles, index.long())
    with patch.object(triton, "paged_decode") as launched:
        DecodeStep(index, index, [PAGES], 1, H200).run_with_rope(qkv, rotation, pool, pool, LayerAttention(1.0))
    call = launched.call_args
    assert call.args[0] is qkv
    assert call.kwargs["rotation"] is rotation
    assert call.kwargs["early"] is early
    assert call.kwargs["delay_next"] is (head_dim == 128), "by the 32 heads of queries, not by all 48"


def test_the_tile_is_for_the_heads_of_queries_alone() -> None:
    """16 of them share a KV head, which a tile of 16 rows holds; including keys and values there would be 18."""
    rows = 64
    index = torch.zeros(rows, dtype=torch.int32)
    qkv, pool = torch.zeros(rows, 18, 64).bfloat16(), torch.zeros(64, 1, 64).bfloat16()
    angles = torch.zeros(rows, 1, 64)
    step = DecodeStep(index, index, [PAGES], 1, H200)
    with patch.object(triton, "paged_decode") as launched:
        step.run_with_rope(qkv, Rotation(angles, angles, index.long()), pool, pool, LayerAttention(1.0))
    assert step.fuses_rope(pool)
    assert launched.call_args.kwargs["early"], "off where a tile has more than 16 rows"


@pytest.mark.parametrize("fuses_rope", [False, True])
def test_the_output_is_quantized_per_query_head(fuses_rope: bool) -> None:
    index = torch.zeros(2, dtype=torch.int32)
    heads, pool = torch.zeros(2, 48 if fuses_rope else 32, 128).bfloat16(), torch.zeros(64, 8, 128).bfloat16()
    angles = torch.zeros(2, 1, 128)
    rotation = Rotation(angles, angles, index.long()) if fuses_rope else None
    step, to = DecodeStep(index, index, [PAGES], 1, H200), ActivationFormat(torch.float8_e4m3fn, 128)
    with patch.object(triton, "paged_decode") as launched:
        found = step.run_quantized(heads, rotation, pool, pool, LayerAttention(1.0), None, to)
    call = launched.call_args
    assert call.args[0] is heads
    assert call.kwargs["rotation"] is rotation
    assert call.kwargs["quantized"] is found
    assert (found.values.shape, found.scales.shape, found.count) == ((4, 32 * 128), (4, 32), 2)


def test_row_scales_are_applied_by_a_second_launch_that_gets_each_heads_amax() -> None:
    index = torch.zeros(2, dtype=torch.int32)
    heads, pool = torch.zeros(2, 32, 128).bfloat16(), torch.zeros(64, 8, 128).bfloat16()
    step, to = DecodeStep(index, index, [PAGES], 1, H200), ActivationFormat(torch.int8)
    with (
        patch.object(triton, "paged_decode", return_value=heads) as attended,
        patch.object(triton, "quantize_by_amax") as quantized,
    ):
        found = step.run_quantized(heads, None, pool, pool, LayerAttention(1.0), None, to)
    assert found is quantized.return_value
    call = attended.call_args.kwargs
    assert (call["amax"].shape, call["amax"].dtype, call["quantized"]) == ((2, 32), torch.float32, None)
    assert call["delay_next"]
    x, amax, wanted, pdl = quantized.call_args.args
    assert (x.shape, wanted, pdl) == ((2, 4096), to, True)
    assert amax is call["amax"]


def test_other_group_sizes_are_quantized_after_attention() -> None:
    index = torch.zeros(2, dtype=torch.int32)
    step, fp8 = DecodeStep(index, index, [PAGES], 1, H200), torch.float8_e4m3fn
    known, rows, heads = ActivationFormat(fp8, scale=torch.ones(1)), ActivationFormat(fp8), ActivationFormat(fp8, 128)
    assert [step.fuses_quant(to, 128) for to in (known, rows, heads)] == [True, True, True]
    assert not step.fuses_quant(heads, 64), "two heads share a scale"
