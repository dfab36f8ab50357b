"""Products of few rows of bytes with bytes, against their oracle."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tandem.engine_core.kernels.linear.byte_gemm import byte_gemm
from tandem.engine_core.kernels.linear.byte_splitk import byte_splitk, multiply_bytes
from tandem.engine_core.kernels.reference.byte_rows import byte_product
from tandem.engine_core.kernels.tiles.plan_types import ByteGemmPlan
from tests.engine_core.kernels.linear.test_byte_gemm import KINDS, case_of, space, strays_of

PLAN = ByteGemmPlan(16, 64, 1, 2, 4)
WIDE = replace(PLAN, block_m=32, block_n=32, split=3)


@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, WIDE])))
@pytest.mark.parametrize("rows", [2, 16])
def test_a_product_equals_its_oracle(kind: str, plan: ByteGemmPlan, rows: int, device: str) -> None:
    x, values, scales, scale_rows = case_of(kind, rows, 80, 512, device)
    bias = torch.randn(80, device=device) if rows == 2 else None
    partials, counters = space(device)
    found = byte_splitk(x, values, scales, bias, plan, partials, counters)
    torch.testing.assert_close(found, byte_product(x, values, scales, bias, scale_rows), atol=1e-3, rtol=1e-4)
    assert not counters.any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp8 blocks"])
def test_a_step_may_be_longer_than_a_block_of_scales(kind: str, device: str) -> None:
    x, values, scales, _ = case_of(kind, 9, 64, 512, device)
    found = byte_splitk(x, values, scales, None, replace(PLAN, block_k=256, split=2), *space(device))
    torch.testing.assert_close(found, byte_product(x, values, scales, None, None), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_end_within_a_tile_have_their_own_scales(whole: bool, device: str) -> None:
    x, values, scales, scale_rows = case_of("fp8 blocks", 5, 304, 384, device, whole)
    found = byte_splitk(x, values, scales, None, replace(PLAN, split=2), *space(device), whole_blocks=whole)
    torch.testing.assert_close(found, byte_product(x, values, scales, None, scale_rows), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("split", [1, 2])
def test_padding_changes_no_row(split: int, device: str) -> None:
    plan = replace(PLAN, split=split)
    x, values, scales, _ = case_of("fp8 blocks", 5, 64, 256, device)
    expected = byte_splitk(x, values, scales, None, plan, *space(device))
    x.values[5:] = 448.0
    x.scales[5:] = float("nan")
    assert torch.equal(byte_splitk(x, values, scales, None, plan, *space(device)), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter tells what is read")
@pytest.mark.parametrize(("kind", "plan"), list(product(KINDS, [PLAN, WIDE])))
def test_nothing_but_the_operands_is_read(kind: str, plan: ByteGemmPlan) -> None:
    assert strays_of(byte_splitk, kind, plan) == 0


def test_more_rows_than_a_tile_has_take_the_other_kernel(device: str) -> None:
    x, values, scales, _ = case_of("int8 outputs", 19, 64, 256, device)
    with pytest.raises(AssertionError, match="19 rows do not fit a tile of 16"):
        byte_splitk(x, values, scales, None, PLAN, *space(device))
    found = multiply_bytes(x, values, scales, None, PLAN, *space(device))
    assert torch.equal(found, byte_gemm(x, values, scales, None, PLAN, *space(device)))
    few = replace(x, values=x.values[:3], scales=x.scales[:3], count=3)
    own = byte_splitk(few, values, scales, None, PLAN, *space(device))
    assert torch.equal(multiply_bytes(few, values, scales, None, PLAN, *space(device)), own)
    none = replace(x, values=x.values[:0], scales=x.scales[:0], count=0)
    assert multiply_bytes(none, values, scales, None, PLAN, *space(device)).shape == (0, 64)


def test_operands_that_do_not_fit_each_other_are_refused(device: str) -> None:
    x, values, scales, _ = case_of("int8 outputs", 3, 64, 256, device)
    with pytest.raises(AssertionError):
        byte_splitk(x, values[:, :128].contiguous(), scales, None, PLAN, *space(device))
    with pytest.raises(AssertionError, match="workspace"):
        byte_splitk(x, values, scales, None, replace(PLAN, split=2), torch.empty(1), torch.empty(1))
