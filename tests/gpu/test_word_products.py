"""Products of one row with quantized weights, compiled: what pairs of float16 and powers of two cost in accuracy."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.linear.word_gemv import word_gemv
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tests.engine_core.kernels.linear import test_nibbles, test_scaled_weights

pytestmark = pytest.mark.gpu

KINDS = ("nibbles", "int8", "fp8", "fp8_bits")
PLANS = (GemvPlan(8, 4096, 2), GemvPlan(4, 4096, 10), GemvPlan(8, 1024))
OUTPUTS, INPUTS = 200, 4096
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Half a unit of the last place of a result, relative to it."""


def weight(kind: str) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """A weight as the kernel takes it, and the numbers that it stands for."""
    if kind == "nibbles":
        (words, scales, zeros), numbers = test_nibbles.weights(OUTPUTS, INPUTS, 128, "cuda")
        return (words, scales, zeros), numbers
    made = "int8" if kind == "int8" else "fp8"
    stored, scales, _ = test_scaled_weights.weights(made, "rows", OUTPUTS, INPUTS, "cuda")
    numbers = stored.float().nan_to_num(448.0)
    if kind != "int8":
        stored = numbers.to(torch.float8_e4m3fn)
    return (stored.view(torch.uint8) if kind == "fp8_bits" else stored, scales, None), numbers * scales[:, None]


def product(x: Tensor, given: tuple[Tensor, Tensor, Tensor | None], plan: GemvPlan) -> Tensor:
    y, _ = word_gemv(x, *given, None, plan, pdl=True)
    return y[0].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_as_exact_as_their_dtype(kind: str, dtype: torch.dtype) -> None:
    """Of inputs whose sizes differ by some thousand times, not much more is lost than by rounding the result."""
    given, numbers = weight(kind)
    seed = torch.Generator("cuda").manual_seed(1)
    for size in (2.0**-12, 2.0**-4):
        spread = torch.exp(2 * torch.randn(1, INPUTS, device="cuda", generator=seed))
        x = (torch.randn(1, INPUTS, device="cuda", generator=seed) * spread * size).to(dtype)
        exact = (x.double() @ numbers.double().t())[0]
        for plan in PLANS:
            error = (product(x, given, plan) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert error < 1.5 * ROUNDING[dtype] + 4e-4, f"{error:.2e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2.0**-50, 2.0**-100, 3e38 / 2**24, 1.0])
def test_equal_inputs_of_any_size_do_not_leave_float16s_range(kind: str, size: float) -> None:
    """The largest sums of a word: all inputs equal, and weights of one sign at the end of their range."""
    given, numbers = weight(kind)
    largest = numbers.abs().amax(1, keepdim=True)
    assert largest.isfinite().all()
    x = torch.full((1, INPUTS), size, device="cuda", dtype=torch.bfloat16)
    exact = (x.double() @ numbers.double().t())[0]
    for plan in PLANS:
        found = product(x, given, plan)
        assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 2e-3 * INPUTS**0.5 * float(largest.max()) * size).all()


def test_zero_points_at_their_bound_stay_in_range() -> None:
    """Levels of 0 less 63: the largest sums that a word of four bits can have, all of one sign."""
    words, scales = (
        torch.zeros(16, INPUTS // 8, dtype=torch.int32, device="cuda"),
        torch.ones(32, 16, device="cuda").t(),
    )
    zeros = torch.full((32, 16), 63, dtype=torch.uint8, device="cuda").t()
    x = torch.full((1, INPUTS), 1.0 - 2.0**-8, device="cuda", dtype=torch.bfloat16)
    for plan in PLANS:
        found = product(x, (words, scales, zeros), plan)
        torch.testing.assert_close(found, torch.full_like(found, -63.0 * INPUTS * float(x[0, 0])), atol=0, rtol=2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zeros_and_what_is_no_number_stays_none(kind: str) -> None:
    given, _ = weight(kind)
    x = torch.zeros(1, INPUTS, device="cuda", dtype=torch.bfloat16)
    assert (product(x, given, PLANS[0]) == 0).all()
    for wrong in (torch.nan, torch.inf):
        x[0, 77] = wrong
        found = product(x, given, PLANS[0])
        assert not found[found != 0].isfinite().any()
