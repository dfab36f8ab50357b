"""Gated W8A8 GEMMs with quantized output, against the oracles of matmul, gate and quantization."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tandem.engine_core.kernels import quantize
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear import gated_w8a8_gemm as kernel
from tandem.engine_core.kernels.linear.gated_w8a8_gemm import gated_w8a8_gemm
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference.quantized_activation import quantized_gate, quantized_matmul
from tandem.engine_core.kernels.tiles.plan_types import W8A8GemmPlan
from tests.engine_core.kernels.linear.test_w8a8_gemm import KINDS, case_of, rows_with_room
from tests.fakes.launched_kernel import LaunchedKernel
from tests.support.noted_reads import count_strays, noted_reads, with_room

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

PLAN = W8A8GemmPlan(16, 32, 1, 2, 4)
BLOCK_PLAN = replace(PLAN, block_n=128)


def format_of(dtype: torch.dtype, kind: str, device: str) -> ActivationFormat:
    known = torch.full((1,), 0.03, device=device) if kind == "static" else None
    return ActivationFormat(dtype, 128 if kind == "group" else None, known)


def check(found: QuantizedActivation, expected: QuantizedActivation) -> None:
    """Check for equality, except for values at a rounding boundary."""
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
    found = gated_w8a8_gemm(x, values, scales, bias, PLAN, activation, form)
    check(found, quantized_gate(quantized_matmul(x, values, scales, bias), activation, form))


@pytest.mark.parametrize("to", ["row", "static", "group"])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_scales_of_blocks(to: str, count: int, device: str) -> None:
    x, values, scales, scale_rows = case_of("fp8 blocks", count, 2 * 256, 384, device, whole=True)
    form = format_of(values.dtype, to, device)
    found = gated_w8a8_gemm(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form)
    check(found, quantized_gate(quantized_matmul(x, values, scales, None, scale_rows), Activation.SILU, form))


def test_padding_changes_no_row(device: str) -> None:
    x, values, scales, _ = case_of("fp8 blocks", 5, 2 * 128, 256, device, whole=True)
    form = format_of(values.dtype, "group", device)
    expected = gated_w8a8_gemm(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form).dequantize()
    x.values[5:] = 448.0
    x.scales[5:] = float("nan")
    assert torch.equal(
        gated_w8a8_gemm(x, values, scales, None, BLOCK_PLAN, Activation.SILU, form).dequantize(), expected
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("to", ["row", "group"])
def test_nan_stays_in_its_row(to: str, device: str) -> None:
    x, values, scales, _ = case_of("fp8 blocks", 3, 2 * 256, 256, device, whole=True)
    x.scales[1, 1] = float("nan")
    rows = gated_w8a8_gemm(x, values, scales, None, BLOCK_PLAN, Activation.SILU, format_of(values.dtype, to, device))
    assert rows.dequantize()[1].isnan().all()
    assert rows.dequantize()[[0, 2]].isfinite().all()


def test_what_a_tile_cannot_hold_is_refused(device: str) -> None:
    x, values, scales, _ = case_of("fp8 outputs", 17, 2 * 128, 256, device)
    static, groups = (format_of(values.dtype, kind, device) for kind in ("static", "group"))
    with pytest.raises(AssertionError, match=r"^17 rows\b.*\b16$"):
        gated_w8a8_gemm(x, values, scales, None, PLAN, Activation.SILU, static)
    with pytest.raises(AssertionError, match=r"\b32 outputs\b.*\b128$"):
        gated_w8a8_gemm(x, values, scales, None, replace(PLAN, block_m=32), Activation.SILU, groups)
    blocks = torch.ones(16, 2, device=device)
    with pytest.raises(AssertionError, match=r"outputs.*\bscales$"):
        gated_w8a8_gemm(x, values, blocks, None, replace(PLAN, block_m=32, block_n=256), Activation.SILU, static)


@pytest.mark.parametrize(
    ("inputs", "width", "weight", "split", "message"),
    [
        ("fp8 outputs", 384, "fp8 outputs", 1, None),
        ("fp8 outputs", 256, "fp8 blocks", 1, None),
        ("fp8 blocks", 256, "fp8 outputs", 1, None),
        ("int8 outputs", 256, "fp8 outputs", 1, None),
        ("fp8 outputs", 256, "fp8 outputs", 2, "halves"),
    ],
    ids=["wide", "of rows for blocks", "of groups for outputs", "of another dtype", "split"],
)
def test_inputs_that_do_not_fit_the_weight_or_are_divided_are_refused(
    inputs: str, width: int, weight: str, split: int, message: str | None, device: str
) -> None:
    x, *_ = case_of(inputs, 5, 2 * 128, width, device)
    _, values, scales, _ = case_of(weight, 5, 2 * 128, 256, device, whole=True)
    to = format_of(values.dtype, "static", device)
    with pytest.raises(AssertionError, match=message):
        gated_w8a8_gemm(x, values, scales, None, replace(BLOCK_PLAN, split=split), Activation.SILU, to)


@pytest.mark.parametrize("pdl", [False, True])
def test_both_launches_are_chained_if_asked(pdl: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    launched = [LaunchedKernel(), LaunchedKernel()]
    monkeypatch.setattr(kernel, "gated_w8a8_gemm_kernel", launched[0])
    monkeypatch.setattr(quantize, "_finish_rows_kernel", launched[1])
    x, values, scales, _ = case_of("fp8 outputs", 5, 2 * 128, 256, device)
    gated_w8a8_gemm(x, values, scales, None, PLAN, Activation.SILU, format_of(values.dtype, "row", device), pdl)
    for each in launched:
        assert (each.options["PDL"], each.options.get("launch_pdl", False)) == (pdl, pdl)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_waits_once_and_before_it_reads_its_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, values, scales, _ = case_of(kind, 5, 2 * 128, 256, "cpu", whole=True)
    given = (values, scales, None, BLOCK_PLAN, Activation.SILU, format_of(values.dtype, "static", "cpu"))
    expected = gated_w8a8_gemm(x, *given)
    shown = replace(x, values=torch.zeros_like(x.values), scales=torch.full_like(x.scales, torch.nan))
    waits = []

    def wait(_pdl: Any) -> None:
        """Replace `wait_for_previous`, with a preceding kernel that writes as late as possible."""
        waits.append(1)
        shown.values.copy_(x.values)
        shown.scales.copy_(x.scales)

    monkeypatch.setattr(kernel, "wait_for_previous", wait)
    found = gated_w8a8_gemm(shown, *given)
    assert waits == [1]
    assert torch.equal(found.dequantize(), expected.dequantize())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter tells what is read")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_operands_is_read(kind: str) -> None:
    """Neither rows nor outputs past the last one."""
    blocks = kind == "fp8 blocks"
    width, plan = (256, BLOCK_PLAN) if blocks else (80, PLAN)
    x, values, scales, _ = case_of(kind, 5, 2 * width, 256, "cpu", whole=True)
    bias = with_room(torch.randn(2 * width), 64)
    x, values, scales = rows_with_room(x), with_room(values, 64 * 256), with_room(scales, 64 * 256)
    to = format_of(values.dtype, "static", "cpu")
    assert to.scale is not None
    with noted_reads() as reads:
        gated_w8a8_gemm(x, values, scales, bias, plan, Activation.SILU, to)
    assert count_strays(reads, x.values[:5], x.scales[:5], values, scales, bias, to.scale) == 0
