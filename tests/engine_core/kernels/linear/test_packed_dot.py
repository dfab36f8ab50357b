"""GEMVs with quantized weights: accuracy and range of float16 pairs and power-of-two scaling."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tandem.engine_core.quantization.int4 import pack
from tests.engine_core.kernels.linear import test_scaled_weights

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

KINDS = ("int4", "int8", "fp8", "fp8_bits")
PLANS = (GemvPlan(8, 1024, 2), GemvPlan(4, 1024, 10), GemvPlan(8, 256))
OUTPUTS, INPUTS, GROUP = 40, 1024, 128
ROUNDING = 2.0**-12
"""Half a unit of the last place of a float16, relative to it; a bfloat16's is eight times as much."""
Given = tuple[Tensor, Tensor, Tensor | None]


def int4(levels: Tensor, zeros: Tensor, device: str) -> Given:
    """Return levels, [OUTPUTS, INPUTS], and zero points, [OUTPUTS, groups], as the kernel takes them, scales 1."""
    scales = torch.ones(zeros.t().shape, device=device).t()
    return pack(to_kernel_layout(levels, GROUP)).to(device), scales, zeros.t().contiguous().to(device).t()


def weight(kind: str, device: str) -> tuple[Given, Tensor]:
    """Return a weight in the kernel's layout, and its dequantized values.

    Int4 values are distributed around their zero point as in trained weights.
    """
    if kind == "int4":
        seed = torch.Generator().manual_seed(7)
        levels = (torch.randn(OUTPUTS, INPUTS, generator=seed) * 2.7 + 8).round().clamp(0, 15).to(torch.uint8)
        zeros = torch.full((OUTPUTS, INPUTS // GROUP), 8, dtype=torch.uint8)
        return int4(levels, zeros, device), (levels.float() - 8).to(device)
    stored, scales, numbers = test_scaled_weights.weights(kind, "rows", OUTPUTS, INPUTS, device)
    return (stored, scales, None), numbers


def constant(kind: str, end: str, device: str) -> tuple[Given, float]:
    """Return a weight whose values are all at one end of its dtype's range, and that value."""
    if kind == "int4":
        level, zero = {"lowest": (0, 63), "highest": (15, 0)}[end]
        levels = torch.full((OUTPUTS, INPUTS), level, dtype=torch.uint8)
        return int4(levels, torch.full((OUTPUTS, INPUTS // GROUP), zero, dtype=torch.uint8), device), level - zero
    number = {"int8": {"lowest": -128.0, "highest": 127.0}}.get(kind, {"lowest": -448.0, "highest": 448.0})[end]
    stored = torch.full((OUTPUTS, INPUTS), number).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    stored = stored.view(torch.uint8) if kind == "fp8_bits" else stored
    return (stored.to(device), torch.ones(OUTPUTS, device=device), None), number


def product(x: Tensor, given: Given, plan: GemvPlan) -> Tensor:
    y, _ = quantized_gemv(x, *given, None, plan, pdl=x.is_cuda)
    return y[0].double()


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_lose_little_compared_with_the_rounding_of_a_result(kind: str, mean: float, device: str) -> None:
    given, numbers = weight(kind, device)
    seed = torch.Generator().manual_seed(1)
    for size in (2.0**-12, 2.0**4):
        for spread in (0.3, 2.0):
            # With the second, magnitudes differ by a factor of some thousand.
            sizes = torch.exp(spread * torch.randn(1, INPUTS, generator=seed)) * size
            x = ((torch.randn(1, INPUTS, generator=seed) + mean) * sizes).bfloat16().to(device)
            exact = (x.double() @ numbers.double().t())[0]
            for plan in PLANS:
                error = product(x.float(), given, plan) - exact
                lost = error.square().mean().sqrt() / exact.square().mean().sqrt()
                assert lost < 3 * ROUNDING, f"{lost:.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_dwarfs_the_others_costs_rows_that_it_cancels_in_nothing(kind: str, device: str) -> None:
    """As some inputs of language models. Zero weights are unaffected."""
    given, numbers = weight(kind, device)
    stored, scales, zeros = given
    place = INPUTS // 2 + 3
    if kind == "int4":
        levels = (numbers + 8).to(torch.uint8)
        levels[:, place] = 8
        assert zeros is not None
        stored = int4(levels.cpu(), zeros.cpu(), device)[0]
    else:
        stored = stored.clone()
        stored.view(torch.uint8)[:, place] = 0
    numbers = numbers.clone()
    numbers[:, place] = 0
    x = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(2))
    x[0, place] = 3000.0
    x = x.bfloat16().to(device)
    exact = (x.double() @ numbers.double().t())[0]
    error = product(x.float(), (stored, scales, zeros), PLANS[0]) - exact
    assert error.square().mean().sqrt() < 8 * ROUNDING * exact.square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["lowest", "highest"])
@pytest.mark.parametrize("size", [2.0**-100, 1.0, 2.0**100])
def test_the_largest_sums_do_not_leave_float16s_range(kind: str, end: str, size: float, device: str) -> None:
    """All inputs are just below a power of two, and weights at one end of their range."""
    given, number = constant(kind, end, device)
    x = torch.full((1, INPUTS), (1 - 2.0**-8) * size, device=device, dtype=torch.bfloat16)
    exact = torch.full((OUTPUTS,), number * INPUTS * float(x[0, 0]), dtype=torch.float64, device=device)
    for plan in PLANS[::2]:
        torch.testing.assert_close(product(x.float(), given, plan), exact, atol=0, rtol=2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_nan_are_preserved(kind: str, device: str) -> None:
    given, _ = weight(kind, device)
    x = torch.zeros(1, INPUTS, device=device)
    assert (product(x, given, PLANS[0]) == 0).all()
    for wrong in (torch.nan, torch.inf):
        x[0, 77] = wrong
        found = product(x, given, PLANS[0])
        assert not found[found != 0].isfinite().any()
