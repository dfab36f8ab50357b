"""RMSNorm layers over the residual stream."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import layer as reference
from tandem.engine_core.kernels.reference.quantized_activation import quantize
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm

CONTEXT = torch_build_context(torch.device("cpu"), torch.bfloat16)


def filled(hidden: int, eps: float = 1e-6) -> RMSNorm:
    """Build a norm that stores weight - 1, with random weights."""
    norm = RMSNorm.build(hidden, eps, CONTEXT, unit_offset=True)
    norm.weight.uniform_(0.5, 1.5)
    return norm


def streams(rows: int, hidden: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, hidden).bfloat16(), torch.randn(rows, hidden).bfloat16()


def test_a_factor_stored_less_one_is_kept_in_float32() -> None:
    norm = RMSNorm.build(8, 1e-6, CONTEXT, unit_offset=True)
    (slot,) = norm.slots("norm")
    stored = torch.full((8,), 2**-9, dtype=torch.bfloat16)
    slot.fill(stored)
    assert torch.equal(norm.weight, torch.full((8,), 1 + 2**-9))


def test_a_sandwich_normalises_the_update_and_the_sum() -> None:
    update, residual = streams(3, 32)
    before, after = filled(32), filled(32)
    normed, stream = SandwichNorm(after, before)(update, residual)
    expected = residual + reference.rms_norm(update, after.weight, 1e-6)
    assert torch.equal(stream, expected)
    assert torch.equal(normed, reference.rms_norm(expected, before.weight, 1e-6))


def test_quantizing_norms_equal_norm_then_quantization() -> None:
    update, residual = streams(3, 32)
    to = ActivationFormat(torch.int8)
    for norm, stream in ((filled(32), None), (filled(32), residual), (SandwichNorm(filled(32), filled(32)), residual)):
        (found, total), (normed, expected_total) = norm.quantized(update, stream, to), norm(update, stream)
        expected = quantize(normed, to)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(total, expected_total)


def test_norms_return_their_columns_in_an_order() -> None:
    update, residual = streams(3, 32)
    order = torch.arange(31, -1, -1, dtype=torch.int32)
    for norm, stream in ((filled(32), None), (filled(32), residual), (SandwichNorm(filled(32), filled(32)), residual)):
        (found, total), (expected, expected_total) = norm(update, stream, order), norm(update, stream)
        assert torch.equal(found, expected.flip(1))
        assert torch.equal(total, expected_total)


def test_a_sandwich_refuses_norms_of_two_eps() -> None:
    with pytest.raises(AssertionError, match="eps"):
        SandwichNorm(filled(8), filled(8, 1e-5))


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
def test_a_matmul_after_two_norms_equals_separate_operations(activation: Activation | None) -> None:
    update, residual = streams(5, 32)
    linear: LinearWeights = CONTEXT.linear("proj", 16, 32)
    (slot,) = linear.slots("", "w")
    slot.target.normal_()
    sandwich = SandwichNorm(filled(32), filled(32))
    normed, stream = sandwich(update, residual)
    product, found = linear.apply_normed(update, residual, sandwich, activation)
    assert torch.equal(found, stream)
    expected = functional.linear(normed, slot.target)
    assert torch.equal(product, expected if activation is None else reference.gated_activation(expected, activation))
