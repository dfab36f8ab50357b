"""Matmuls with int4 weights against dequantized weights, in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.kernels.linear.int4_splitk import int4_splitk
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.reference.layer import (
    add_rms_norm,
    gated_activation,
    norm_add_rms_norm,
    rms_norm,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.quantization.int4 import pack, unpack
from tests.support.quantized_matmuls import assert_product

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

EPS = 1e-5
Weights = tuple[Tensor, Tensor, Tensor]


def weights(outputs: int, inputs: int, group: int, device: str) -> tuple[Weights, Tensor]:
    """Words, scales and zero points, and the dequantized weights."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), generator=generator, dtype=torch.int32)
    scales = (torch.rand(inputs // group, outputs, generator=generator).t() - 0.5) / 5
    zeros = torch.randint(0, 16, (inputs // group, outputs), generator=generator, dtype=torch.uint8).t()
    spread = [tensor.repeat_interleave(group, 1) for tensor in (scales, zeros)]
    numbers = (unpack(words).float() - spread[1]) * spread[0]
    words = pack(to_kernel_layout(unpack(words), group))
    return (words.to(device), scales.to(device), zeros.to(device)), numbers.to(device)


def vectors(rows: int, inputs: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(device)


def shuffled(inputs: int, device: str) -> Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)).int().to(device)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "plan"),
    [
        (13, 128, 32, GemvPlan(16, 128)),
        (9, 160, 32, GemvPlan(16, 64)),
        (8, 96, 96, GemvPlan(16, 128)),
        (24, 384, 128, GemvPlan(16, 256)),
        (24, 384, 64, GemvPlan(16, 512)),
    ],
)
def test_gemv_equals_the_library(outputs: int, inputs: int, group: int, plan: GemvPlan, device: str) -> None:
    stored, numbers = weights(outputs, inputs, group, device)
    x, bias = vectors(1, inputs, device), torch.arange(float(outputs), device=device)
    y, stream = quantized_gemv(x, *stored, bias, plan)
    assert_product(y, x, numbers, bias)
    assert stream is x


ORDERED_SHAPES = [
    (13, 128, 32, GemvPlan(16, 128)),
    (8, 96, 96, GemvPlan(16, 128)),
    (9, 160, 32, GemvPlan(16, 64)),
    (24, 384, 64, GemvPlan(16, 512)),
    (17, 4224, 128, GemvPlan(16, 2048)),
    (16, 8192, 128, GemvPlan(16, 2048)),
]
"""One step, full or partial, and several, including inputs above 4096."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group", "plan"), ORDERED_SHAPES)
def test_gemv_takes_its_inputs_in_an_order(
    outputs: int, inputs: int, group: int, plan: GemvPlan, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    stored, numbers = weights(outputs, inputs, group, device)
    x, order = vectors(1, inputs, device).to(dtype), shuffled(inputs, device)
    bias = torch.arange(float(outputs), device=device).to(dtype) if has_bias else None
    y, stream = quantized_gemv(x, *stored, bias, plan, order=order)
    assert stream is x
    assert_product(y, x[:, order], numbers, bias, relative=1e-4 if dtype == torch.float32 else 2**-10)


def test_an_order_of_another_dtype_or_length_is_refused(device: str) -> None:
    stored, _ = weights(16, 128, 32, device)
    x, order = vectors(1, 128, device), shuffled(128, device)
    for wrong in (order.long(), order[:64], order.repeat_interleave(2)[::2]):
        with pytest.raises(AssertionError):
            quantized_gemv(x, *stored, None, GemvPlan(16, 128), order=wrong)


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**40])
def test_gemv_reads_every_int4_value_at_every_index_exactly(size: float, device: str) -> None:
    levels = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 64).contiguous()
    scales, zeros = torch.full((2, 16), 0.5).t(), torch.full((2, 16), 7, dtype=torch.uint8).t()
    words = pack(to_kernel_layout(levels, 32))
    for place in range(32):
        x = torch.zeros(1, 64)
        x[0, 32 + place] = size
        stored = [tensor.to(device) for tensor in (words, scales, zeros)]
        y, _ = quantized_gemv(x.to(device), *stored, None, GemvPlan(16, 64))
        assert torch.equal(y.cpu()[0], (torch.arange(16.0) - 7) * 0.5 * size)


@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("mode", ["norm", "add_norm", "norm_add_norm"])
@pytest.mark.parametrize("ordered", [False, True])
def test_fused_steps_equal_separate_operations(
    ordered: bool, mode: str, activation: Activation | None, device: str
) -> None:
    stored, numbers = weights(24, 96, 32, device)
    x, norm_weight = vectors(1, 96, device), vectors(1, 96, device, 1)[0]
    residual = None if mode == "norm" else vectors(1, 96, device, 2)
    x_weight = vectors(1, 96, device, 3)[0] if mode == "norm_add_norm" else None
    if residual is None:
        normed, total = rms_norm(x, norm_weight, EPS), x
    elif x_weight is None:
        normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    else:
        normed, total = norm_add_rms_norm(x, x_weight, residual, norm_weight, EPS)
    bias = torch.arange(24.0, device=device) - 9
    plan = GemvPlan(16 if activation is None else 8, 128)
    order = shuffled(96, device) if ordered else None
    if order is not None:
        normed = normed[:, order]
    given = (x, *stored, bias, plan, activation, False, norm_weight, EPS, residual, x_weight)
    y, stream = quantized_gemv(*given, order)
    assert_product(y, normed, numbers, bias, activation)
    assert torch.equal(stream, total)


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "split", "activation"),
    [
        (72, 128, 32, 1, None),
        (72, 128, 64, 2, None),
        (40, 160, 32, 3, Activation.SILU),
        (64, 256, 256, 2, Activation.GELU_TANH),
    ],
)
def test_splitk_equals_the_library(
    outputs: int, inputs: int, group: int, split: int, activation: Any, device: str
) -> None:
    plan = SplitKPlan(block_n=32, block_k=32, split=split)
    stored, numbers = weights(outputs, inputs, group, device)
    x, bias = vectors(5, inputs, device), torch.arange(float(outputs), device=device)
    columns = outputs if activation is None else outputs // 2
    floats, counters = workspace_size(5, columns, plan, activation is not None)
    space = torch.full((floats,), float("nan"), device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    y = int4_splitk(x, *stored, bias, plan, *space, activation)
    expected = functional.linear(x, numbers, bias)
    close(y, expected if activation is None else gated_activation(expected, activation))
    assert not space[1].any()


def test_steps_that_end_within_a_block_of_the_order_are_refused(device: str) -> None:
    stored, _ = weights(16, 256, 128, device)
    with pytest.raises(AssertionError, match=r"\b64\b.*\border$"):
        quantized_gemv(vectors(1, 256, device), *stored, None, GemvPlan(8, 64))


def test_a_block_across_groups_is_refused(device: str) -> None:
    stored, _ = weights(32, 128, 32, device)
    with pytest.raises(AssertionError, match=r"\b32 inputs\b.*\bblocks of 64\b"):
        int4_splitk(vectors(2, 128, device), *stored, None, SplitKPlan(32, 64, 1), *(torch.zeros(0),) * 2)
