"""The Triton kernels that quantize activations, against their oracles."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels import quantize as kernel
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gated_activation import quantized_gate
from tandem.engine_core.kernels.norm import quantized_norm
from tandem.engine_core.kernels.quantize import MAX_INPUTS, quantize, quantize_by_amax
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference import quantized_activation as reference
from tests.fakes.launched_kernel import LaunchedKernel

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DTYPES = (torch.float8_e4m3fn, torch.int8)
KINDS = ("row", "group", "static")


def format_of(dtype: torch.dtype, kind: str, device: str) -> ActivationFormat:
    if kind == "group":
        return ActivationFormat(dtype, 128)
    return ActivationFormat(dtype, scale=torch.full((1,), 0.01, device=device) if kind == "static" else None)


def rows_of(count: int, inputs: int, device: str) -> Tensor:
    """Rows of very different magnitudes, with zeros, a row of zeros and a group of zeros."""
    generator = torch.Generator().manual_seed(count + inputs)
    x = torch.randn(count, inputs, generator=generator) * torch.logspace(-3, 2, count)[:, None]
    x[:, :128:3] = 0
    x[-1] = 0
    x[0, 128:256] = 0
    return x.to(device)


def check(found: QuantizedActivation, expected: QuantizedActivation) -> None:
    """Check for equality, except for few values that a division's last bit moves by one step."""
    assert (found.values.dtype, found.count, found.dtype) == (expected.values.dtype, expected.count, expected.dtype)
    assert found.scales.shape == expected.scales.shape
    count = found.count
    torch.testing.assert_close(found.scales[:count], expected.scales[:count], rtol=1e-6, atol=0)
    ours, oracle = found.values[:count].float(), expected.values[:count].float()
    assert (ours == oracle).float().mean() > 0.99
    step = 1.0 if found.values.dtype == torch.int8 else oracle.abs() / 7 + 2**-9
    assert ((ours - oracle).abs() <= step).all()


@pytest.mark.parametrize(("dtype", "kind"), list(product(DTYPES, KINDS)))
@pytest.mark.parametrize(("count", "inputs"), [(5, 384), (1, 128), (4, 1280)])
def test_quantization_equals_its_oracle(dtype: torch.dtype, kind: str, count: int, inputs: int, device: str) -> None:
    x, to = rows_of(count, inputs, device), format_of(dtype, kind, device)
    check(quantize(x, to), reference.quantize(x, to))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_takes_strided_rows_of_any_width_and_no_rows(dtype: torch.dtype, device: str) -> None:
    to = ActivationFormat(dtype)
    x = rows_of(3, 400, device)[:, 7:300]
    check(quantize(x, to), reference.quantize(x, to))
    assert quantize(x[:0], to).values.shape == (0, 293)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_by_amax_of_tiles_equals_quantize(dtype: torch.dtype, device: str) -> None:
    """Tiles do not end where a program's part of a row does."""
    x, to = rows_of(3, 1280 + 40, device), ActivationFormat(dtype)
    amax = torch.stack([part.abs().amax(1) for part in x.split(48, 1)], 1).contiguous()
    check(quantize_by_amax(x, amax, to), reference.quantize(x, to))


@pytest.mark.parametrize("pdl", [False, True])
def test_quantize_by_amax_uses_pdl_if_asked(pdl: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    launched = LaunchedKernel()
    monkeypatch.setattr(kernel, "_finish_rows_kernel", launched)
    x = rows_of(3, 256, device)
    quantize_by_amax(x, x[:, :2].contiguous(), ActivationFormat(torch.int8), pdl)
    assert (launched.options["PDL"], launched.options.get("launch_pdl", False)) == (pdl, pdl)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
def test_a_program_waits_once_before_it_reads_values_and_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    x, to = rows_of(2, 400, "cpu")[:1], ActivationFormat(torch.int8)
    amax = torch.stack([part.abs().amax(1) for part in x.split(100, 1)], 1)
    expected = quantize_by_amax(x, amax, to)
    shown = [torch.full_like(part, torch.nan) for part in (x, amax)]
    waits = []

    def wait(pdl: Any) -> None:
        """Replace `wait_for_previous`, with a preceding kernel that writes as late as possible."""
        waits.append(bool(pdl))
        for part, written in zip(shown, (x, amax), strict=True):
            part.copy_(written)

    monkeypatch.setattr(kernel, "wait_for_previous", wait)
    found = quantize_by_amax(shown[0], shown[1], to)
    assert waits == [False]
    assert torch.equal(found.values, expected.values) and torch.equal(found.scales, expected.scales)


def test_values_out_of_range_of_a_static_scale_are_clamped(device: str) -> None:
    x = torch.tensor([[1e9, -1e9, 3.0, float("inf")]], device=device)
    for dtype, top in ((torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)):
        rows = quantize(x, ActivationFormat(dtype, scale=torch.ones(1, device=device)))
        assert rows.values.float().tolist() == [[top, -top, 3.0, top]]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(("dtype", "kind"), list(product(DTYPES, ("row", "group"))))
def test_quantization_propagates_nan(dtype: torch.dtype, kind: str, device: str) -> None:
    """Otherwise the sampler, which ends a request with NaN logits, would not notice."""
    x, to = rows_of(3, 384, device), format_of(dtype, kind, device)
    x[1, 200] = float("nan")
    for rows in (quantize(x, to), reference.quantize(x, to)):
        numbers = rows.dequantize()
        assert numbers[1, 200].isnan()
        assert numbers[1, :128].isnan().all() == (kind == "row")
        assert numbers[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantization_is_close_and_keeps_zeros(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([[1e-30, -1e-30], [3e4, 1.0], [0.0, 0.0], [-7.0, 3.5]], device=device)
    for rows in (quantize(x, ActivationFormat(dtype)), reference.quantize(x, ActivationFormat(dtype))):
        error = (rows.dequantize() - x).abs()
        assert (error <= x.abs().amax(1, keepdim=True) / (250 if dtype == torch.int8 else 2**4)).all()
        assert (rows.dequantize()[2] == 0).all()


def test_groups_pad_rows_to_four_and_lie_one_after_another(device: str) -> None:
    rows = quantize(rows_of(5, 256, device), ActivationFormat(torch.int8, 128))
    assert rows.values.shape == (8, 256)
    assert (rows.scales.shape, rows.scales.stride()) == ((8, 2), (1, 8))


def test_wrong_rows_and_groups_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        quantize(torch.zeros(4, 8, device=device).t(), ActivationFormat(torch.int8))
    with pytest.raises(ValueError, match=r"^200 inputs\b.*\b128$"):
        quantize(torch.zeros(4, 200, device=device), ActivationFormat(torch.int8, 128))
    with pytest.raises(ValueError, match=rf"\b70000 inputs\b.*\b{MAX_INPUTS}$"):
        quantize(torch.zeros(1, 70000, device=device), ActivationFormat(torch.int8))


@pytest.mark.parametrize(("dtype", "kind"), list(product(DTYPES, KINDS)))
@pytest.mark.parametrize("variant", ["alone", "add", "norm and add"])
def test_a_quantizing_norm_equals_its_oracle(dtype: torch.dtype, kind: str, variant: str, device: str) -> None:
    x, to = rows_of(3, 384, device), format_of(dtype, kind, device)
    residual = None if variant == "alone" else x.roll(1, 0) * 2 + 1
    x_weight = torch.rand(384, device=device) + 0.5 if variant == "norm and add" else None
    given = (x, residual, x_weight, torch.rand(384, device=device), 1e-5, to)
    (found, total), (expected, expected_total) = quantized_norm(*given), reference.quantized_norm(*given)
    check(found, expected)
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-5)
    assert (total is x) == (residual is None)


@pytest.mark.parametrize(("dtype", "kind"), list(product(DTYPES, KINDS)))
@pytest.mark.parametrize(("count", "width"), [(3, 384), (1, 1280)])
def test_a_quantizing_gate_equals_its_oracle(
    dtype: torch.dtype, kind: str, count: int, width: int, device: str
) -> None:
    gate_up, to = rows_of(count, 2 * width, device), format_of(dtype, kind, device)
    for activation in Activation:
        check(quantized_gate(gate_up, activation, to), reference.quantized_gate(gate_up, activation, to))
    assert quantized_gate(gate_up[:0], Activation.SILU, to).count == 0
