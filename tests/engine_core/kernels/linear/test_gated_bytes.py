"""Gated products of bytes that are rounded to bytes, against the oracles of product, gate and rounding."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.byte_rows import ByteFormat, ByteRows
from tandem.engine_core.kernels.linear.gated_bytes import gated_bytes
from tandem.engine_core.kernels.reference.byte_rows import byte_product, quantized_gate
from tandem.engine_core.kernels.tiles.plan_types import ByteGemmPlan
from tests.engine_core.kernels.linear.test_byte_gemm import KINDS, case_of

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

PLAN = ByteGemmPlan(16, 32, 1, 2, 4)
BLOCK_PLAN = replace(PLAN, block_n=128)


def format_of(dtype: torch.dtype, kind: str, device: str) -> ByteFormat:
    known = torch.full((1,), 0.03, device=device) if kind == "static" else None
    return ByteFormat(dtype, 128 if kind == "group" else None, known)


def check(found: ByteRows, expected: ByteRows) -> None:
    """Check for equality, but for numbers that the order of sums, or the interpreter, rounds to their neighbour."""
    count = expected.count
    assert (found.count, found.dtype, found.values.shape) == (count, expected.dtype, expected.values.shape)
    torch.testing.assert_close(found.scales[:count], expected.scales[:count], rtol=1e-5, atol=0)
    ours, oracle = found.values[:count].float(), expected.values[:count].float()
    assert (ours == oracle).float().mean() > 0.95
    step = 1.0 if found.values.dtype == torch.int8 else oracle.abs() / 2 + 2**-8
    assert ((ours - oracle).abs() <= step).all()


@pytest.mark.parametrize(("kind", "to"), list(product([*KINDS][:2] + [*KINDS][3:], ("row", "static"))))
@pytest.mark.parametrize("activation", Activation)
def test_scales_of_outputs(kind: str, to: str, activation: Activation, device: str) -> None:
    """Tiles end within each half of the weight."""
    x, values, scales, _ = case_of(kind, 5, 2 * 80, 256, device)
    bias = torch.randn(160, device=device) if to == "row" else None
    form = format_of(values.dtype, to, device)
    found = gated_bytes(x, values, scales, bias, PLAN, activation, form)
    check(found, quantized_gate(byte_product(x, values, scales, bias), activation, form))


@pytest.mark.parametrize("to", ["row", "static", "group"])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_scales_of_blocks(to: str, count: int, device: str) -> None:
    x, values, scales, scale_rows = case_of("fp8 blocks", count, 2 * 256, 384, device, whole=True)
    form = format_of(values.dtype, to, device)
    found = gated_bytes(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form)
    check(found, quantized_gate(byte_product(x, values, scales, None, scale_rows), Activation.SILU, form))


def test_padding_changes_no_row(device: str) -> None:
    x, values, scales, _ = case_of("fp8 blocks", 5, 2 * 128, 256, device, whole=True)
    form = format_of(values.dtype, "group", device)
    expected = gated_bytes(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form).numbers()
    x.values[5:] = 448.0
    x.scales[5:] = float("nan")
    assert torch.equal(gated_bytes(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form).numbers(), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("to", ["row", "group"])
def test_what_is_no_number_stays_none_in_its_row(to: str, device: str) -> None:
    x, values, scales, _ = case_of("fp8 blocks", 3, 2 * 256, 256, device, whole=True)
    x.scales[1, 1] = float("nan")
    rows = gated_bytes(x, values, scales, None, BLOCK_PLAN, Activation.SILU, format_of(values.dtype, to, device))
    assert rows.numbers()[1].isnan().all()
    assert rows.numbers()[[0, 2]].isfinite().all()


def test_what_a_tile_cannot_hold_is_refused(device: str) -> None:
    x, values, scales, _ = case_of("fp8 outputs", 17, 2 * 128, 256, device)
    static, groups = (format_of(values.dtype, kind, device) for kind in ("static", "group"))
    with pytest.raises(AssertionError, match="17 rows do not fit a tile of 16"):
        gated_bytes(x, values, scales, None, PLAN, Activation.SILU, static)
    with pytest.raises(AssertionError, match="tiles of 32 outputs hold no groups of 128"):
        gated_bytes(x, values, scales, None, replace(PLAN, block_m=32), Activation.SILU, groups)
    blocks = torch.ones(16, 2, device=device)
    with pytest.raises(AssertionError, match="share their scales"):
        gated_bytes(x, values, blocks, None, replace(PLAN, block_m=32, block_n=256), Activation.SILU, static)
