"""Split-K GEMMs against plain torch, in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.reference.layer import gated_activation
from tandem.engine_core.kernels.tiles.plan_types import SplitKPlan

# Where the sigmoid is zero, the exponential under it overflows, which only NumPy reports.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def operands(rows: int, outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(rows * outputs + inputs)
    weight, bias = torch.randn(outputs, inputs, device=device), torch.randn(outputs, device=device)
    return torch.randn(rows, inputs, device=device), weight, bias


def workspace(floats: int, counters: int, device: str) -> tuple[Tensor, Tensor]:
    """Return partial sums that are NaN and counters that are zero."""
    stale = torch.full((floats,), float("nan"), device=device)
    return stale, torch.zeros(counters, dtype=torch.int32, device=device)


@pytest.mark.parametrize("split", [1, 3, 4])
@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("outputs", [32, 21])
def test_splitk_equals_the_library_and_resets_its_counters(outputs: int, rows: int, split: int, device: str) -> None:
    plan = SplitKPlan(block_n=16, block_k=16, split=split)
    x, weight, bias = operands(rows, outputs, 64, device)
    space = workspace(*workspace_size(rows, outputs, plan), device)
    y = splitk_gemm(x, weight, bias, plan, *space)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    assert not space[1].any(), "counters return to zero"
    assert torch.equal(splitk_gemm(x, weight, bias, plan, *space), y)
    out = torch.full((rows + 1, outputs), torch.nan, device=device)
    splitk_gemm(x, weight, bias, plan, *space, out=out[:rows])
    assert torch.equal(out[:rows], y) and out[rows:].isnan().all()


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("split", [1, 2])
def test_splitk_before_an_activation_equals_separate_operations(
    split: int, with_bias: bool, activation: Activation, device: str
) -> None:
    plan = SplitKPlan(block_n=16, block_k=16, split=split)
    x, weight, bias = operands(5, 42, 64, device)
    chosen = bias if with_bias else None
    space = workspace(*workspace_size(5, 21, plan, True), device)
    y = splitk_gemm(x, weight, chosen, plan, *space, activation=activation)
    expected = gated_activation(functional.linear(x, weight, chosen), activation)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


def test_one_workspace_serves_different_shapes(device: str) -> None:
    space = workspace(4096, 8, device)
    for rows, outputs, inputs, split in ((2, 48, 64, 4), (16, 32, 32, 2), (3, 16, 112, 3)):
        x, weight, bias = operands(rows, outputs, inputs, device)
        y = splitk_gemm(x, weight, bias, SplitKPlan(16, 16, split), *space)
        torch.testing.assert_close(y, functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_splitk_refuses_indivisible_inputs_and_small_workspaces(device: str) -> None:
    space = workspace(4096, 8, device)
    x, weight, _ = operands(2, 16, 40, device)
    with pytest.raises(AssertionError, match="divisible"):
        splitk_gemm(x, weight, None, SplitKPlan(16, 16, 1), *space)
    x, weight, _ = operands(2, 16, 80, device)
    with pytest.raises(AssertionError, match="divisible"):
        splitk_gemm(x, weight, None, SplitKPlan(16, 16, 6), *space)
    with pytest.raises(AssertionError, match="workspace"):
        splitk_gemm(x, weight, None, SplitKPlan(16, 16, 2), space[0][:100], space[1])
