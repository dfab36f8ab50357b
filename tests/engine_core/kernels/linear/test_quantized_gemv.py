"""GEMVs with quantized weights, using the plans chosen for shapes of any size."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear import quantized_gemv as quantized_gemv_module
from tandem.engine_core.kernels.linear.plans import choose_normed
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.quantized_plans import (
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
)
from tandem.engine_core.kernels.reference.layer import rms_norm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tests.engine_core.kernels.linear import test_int4, test_scaled_weights
from tests.fakes.gpus import A100, H200
from tests.support.quantized_matmuls import assert_product
from tests.support.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

EPS = 1e-5
INPUTS = [32, 96, 160, 256, 1056, 2560]
Given = tuple[Tensor, Tensor, Tensor | None]


def assert_equals_separate_operations(
    given: Given, numbers: Tensor, plan: object, gated: bool, norm: bool, device: str
) -> None:
    assert isinstance(plan, GemvPlan)
    x = torch.randn(1, numbers.shape[1], device=device)
    weight = torch.rand(numbers.shape[1], device=device) if norm else None
    activation = Activation.SILU if gated else None
    bias = torch.randn(len(numbers), device=device)
    y, _ = quantized_gemv(x, *given, bias, plan, activation, norm_weight=weight, eps=EPS)
    assert_product(y, x if weight is None else rms_norm(x, weight, EPS), numbers, bias, activation)


@pytest.mark.parametrize(
    ("inputs", "group", "gated", "norm"), thinned(INPUTS, [32, 128, 0], [False, True], [False, True])
)
def test_four_bits_by_the_chosen_plan(inputs: int, group: int, gated: bool, norm: bool, device: str) -> None:
    """group: 0 for all inputs. Shapes whose inputs it does not divide use the minimum of 32."""
    group = group or inputs
    group = group if inputs % group == 0 else 32
    for gpu in (H200, A100):
        given, numbers = test_int4.weights(24 * (1 + gated), inputs, group, device)
        choose = choose_int4_gated if gated else choose_int4
        plan = choose_int4_normed(24, inputs, group, gated, gpu) if norm else choose(1, 24, inputs, group, gpu)
        assert_equals_separate_operations(given, numbers, plan, gated, norm, device)


@pytest.mark.parametrize(
    ("kind", "scales", "inputs", "gated", "norm"),
    thinned(["int8", "fp8"], ["rows", "blocks"], INPUTS, [False, True], [False, True]),
)
def test_8_bit_weights_with_the_chosen_plan(
    kind: str, scales: str, inputs: int, gated: bool, norm: bool, device: str
) -> None:
    outputs = 32 if gated and scales == "blocks" else 24
    stored, scale, numbers = test_scaled_weights.weights(kind, scales, outputs * (1 + gated), inputs, device)
    for gpu in (H200, A100):
        choose = choose_eight_bit_gated if gated else choose_eight_bit
        plan = choose_normed(outputs, inputs, gated, gpu, 8) if norm else choose(1, outputs, inputs, gpu)
        assert_equals_separate_operations((stored, scale, None), numbers, plan, gated, norm, device)


def test_a_gate_that_ends_within_a_block_of_scales_is_refused(device: str) -> None:
    stored, scale, _ = test_scaled_weights.weights("fp8", "blocks", 48, 128, device)
    x = torch.zeros(1, 128, device=device)
    with pytest.raises(AssertionError, match=r"\bgate\b"):
        quantized_gemv(x, stored, scale, None, None, GemvPlan(8, 128), Activation.SILU)
    with pytest.raises(AssertionError, match=r"\brows of a tile\b"):
        quantized_gemv(x, stored, scale, None, None, GemvPlan(32, 128))
    with pytest.raises(AssertionError, match=r"\bblock_k 64\b.* 128\b"):
        quantized_gemv(x, stored, scale, None, None, GemvPlan(8, 64, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel before is a Python function")
@pytest.mark.parametrize(
    ("plan", "norm"), [(GemvPlan(8, 256), False), (GemvPlan(8, 256), True), (GemvPlan(8, 128), False)]
)
def test_a_program_waits_before_it_reads_what_the_kernel_before_writes(
    plan: GemvPlan, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, scale, numbers = test_scaled_weights.weights("int8", "rows", 8, 256, "cpu")
    x, residual, weight = torch.randn(3, 1, 256).unbind(0)
    late = [torch.full_like(part, torch.nan) for part in (x, residual)]
    waits = []

    def wait(_pdl: object) -> None:
        waits.append(1)
        for part, written in zip(late, (x, residual), strict=True):
            part.copy_(written)

    monkeypatch.setattr(quantized_gemv_module, "wait_for_previous", wait)
    given = (weight[0], EPS, late[1]) if norm else ()
    y, _ = quantized_gemv(late[0], stored, scale, None, None, plan, None, False, *given)
    assert_product(y, rms_norm(x + residual, weight[0], EPS) if norm else x, numbers)
    assert waits == [1]
