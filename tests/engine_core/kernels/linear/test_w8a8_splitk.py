"""Split-K W8A8 GEMMs for few rows, against their oracle."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tandem.engine_core.kernels.linear.w8a8_gemm import w8a8_gemm
from tandem.engine_core.kernels.linear.w8a8_splitk import w8a8_matmul, w8a8_splitk
from tandem.engine_core.kernels.reference.quantized_activation import quantized_matmul
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan
from tests.engine_core.kernels.linear.test_w8a8_gemm import KINDS, case_of, space, strays_of

PLAN = W8A8GemmPlan(16, 64, 1, 2, 4)
WIDE = replace(PLAN, block_m=32, block_n=32, split=3)


@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, WIDE])))
@pytest.mark.parametrize("rows", [2, 16])
def test_the_gemm_equals_its_oracle(kind: str, plan: W8A8GemmPlan, rows: int, device: str) -> None:
    x, values, scales, scale_rows = case_of(kind, rows, 80, 512, device)
    bias = torch.randn(80, device=device) if rows == 2 else None
    partials, counters = space(device)
    found = w8a8_splitk(x, values, scales, bias, plan, partials, counters)
    torch.testing.assert_close(found, quantized_matmul(x, values, scales, bias, scale_rows), atol=1e-3, rtol=1e-4)
    assert not counters.any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp8 blocks"])
def test_a_step_may_be_longer_than_a_block_of_scales(kind: str, device: str) -> None:
    x, values, scales, _ = case_of(kind, 9, 64, 512, device)
    found = w8a8_splitk(x, values, scales, None, replace(PLAN, block_k=256, split=2), *space(device))
    torch.testing.assert_close(found, quantized_matmul(x, values, scales, None, None), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_end_within_a_tile_have_their_own_scales(whole: bool, device: str) -> None:
    x, values, scales, scale_rows = case_of("fp8 blocks", 5, 304, 384, device, whole)
    found = w8a8_splitk(x, values, scales, None, replace(PLAN, split=2), *space(device), whole_blocks=whole)
    torch.testing.assert_close(found, quantized_matmul(x, values, scales, None, scale_rows), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("split", [1, 2])
def test_padding_changes_no_row(split: int, device: str) -> None:
    plan = replace(PLAN, split=split)
    x, values, scales, _ = case_of("fp8 blocks", 5, 64, 256, device)
    expected = w8a8_splitk(x, values, scales, None, plan, *space(device))
    x.values[5:] = 448.0
    x.scales[5:] = float("nan")
    assert torch.equal(w8a8_splitk(x, values, scales, None, plan, *space(device)), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter tells what is read")
@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, WIDE])))
def test_nothing_but_the_operands_is_read(kind: str, plan: W8A8GemmPlan) -> None:
    assert strays_of(w8a8_splitk, kind, plan) == 0


def test_more_rows_than_a_tile_has_take_the_other_kernel(device: str) -> None:
    x, values, scales, _ = case_of("int8 outputs", 19, 64, 256, device)
    with pytest.raises(AssertionError, match=r"^19 rows\b.*\b16$"):
        w8a8_splitk(x, values, scales, None, PLAN, *space(device))
    found = w8a8_matmul(x, values, scales, None, PLAN, *space(device))
    assert torch.equal(found, w8a8_gemm(x, values, scales, None, PLAN, *space(device)))
    few = replace(x, values=x.values[:3], scales=x.scales[:3], count=3)
    own = w8a8_splitk(few, values, scales, None, PLAN, *space(device))
    assert torch.equal(w8a8_matmul(few, values, scales, None, PLAN, *space(device)), own)
    none = replace(x, values=x.values[:0], scales=x.scales[:0], count=0)
    assert w8a8_matmul(none, values, scales, None, PLAN, *space(device)).shape == (0, 64)


def test_operands_that_do_not_fit_each_other_are_refused(device: str) -> None:
    x, values, scales, _ = case_of("int8 outputs", 3, 64, 256, device)
    with pytest.raises(AssertionError):
        w8a8_splitk(x, values[:, :128].contiguous(), scales, None, PLAN, *space(device))
    with pytest.raises(AssertionError, match="workspace"):
        w8a8_splitk(x, values, scales, None, replace(PLAN, split=2), torch.empty(1), torch.empty(1))
