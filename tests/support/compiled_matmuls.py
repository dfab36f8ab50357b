"""Matmul launches to be compiled by `compiled_kernels`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.kernel_set import triton_kernels
from tandem.engine_core.kernels.linear.dequantize import dequantize_eight_bit, dequantize_int4
from tandem.engine_core.kernels.linear.gated_w8a8_gemm import gated_w8a8_gemm
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
from tandem.engine_core.kernels.linear.int4_splitk import int4_splitk
from tandem.engine_core.kernels.linear.plans import choose, choose_gated, choose_normed
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.quantized_plans import (
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_gated_w8a8_gemm,
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
    choose_w8a8_gemm,
)
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.linear.w8a8_splitk import w8a8_matmul
from tandem.engine_core.kernels.quantized_activation import KNOWN, WHOLE, ActivationFormat, empty_quantized_activation
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import EightBitKind, Scaling

FP8 = torch.float8_e4m3fn
SHAPES = (
    *((3072, 2048, False), (2048, 8192, False), (4096, 14336, False)),
    *((16384, 2048, True), (28672, 4096, True), (19456, 2560, True)),
)
"""Outputs and inputs of weights of the measured models, and whether their matmuls are gated."""
BOTH = (False, True)
Launch = Callable[[], object]


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def products(
    gpu: GpuTraits, rows: int, outputs: int, inputs: int, gates: tuple[bool, ...] = BOTH
) -> Iterator[Launch]:  # fmt: skip
    """The chosen matmuls of a weight, plain and gated."""
    x, weight = half(rows, inputs), half(outputs, inputs)
    space = torch.empty(1 << 22), torch.zeros(1 << 12, dtype=torch.int32)
    for gated in gates:
        chooser, activation = (choose_gated, Activation.SILU) if gated else (choose, None)
        plan = chooser(rows, outputs // (1 + gated), inputs, 2, gpu)
        if isinstance(plan, SplitKPlan):
            call = (x, weight, None, plan, *space, activation, gpu.pdl)
            yield lambda call=call: splitk_gemm(*call)
        elif isinstance(plan, GemvPlan):
            yield lambda plan=plan, act=activation: gemv(x, weight, None, plan, act, gpu.pdl)


def normed_products(
    gpu: GpuTraits, outputs: int, inputs: int, gates: tuple[bool, ...] = BOTH
) -> Iterator[Launch]:  # fmt: skip
    """The chosen matmuls of one row fused with one norm, and with two."""
    x, weight = half(1, inputs), half(outputs, inputs)
    for gated in gates:
        shape = outputs // (1 + gated), inputs, gated
        plan, sandwiched = choose_normed(*shape, gpu), choose_normed(*shape, gpu, norms=2)
        if plan is not None and sandwiched is not None:
            one = (x, x, None, half(inputs), 1e-5, weight, None, plan, Activation.SILU if gated else None, gpu.pdl)
            yield lambda one=one: normed_gemv(*one)
            factors, activation = half(inputs, dtype=torch.float32), Activation.GELU_TANH if gated else None
            two = (x, x, factors, factors, 1e-6, weight, None, sandwiched, activation, gpu.pdl)
            yield lambda two=two: normed_gemv(*two)


def few_rows_products(gpu: GpuTraits, inputs: int = 2048) -> Iterator[Launch]:
    """Matmuls of three rows by a GEMV, gated and fused with two norms, and in steps."""
    x, weight, factors = half(3, inputs), half(4096, inputs), half(inputs, dtype=torch.float32)
    plan, steps = GemvPlan(4, inputs, 2, 8), GemvPlan(4, 1024)
    yield lambda: normed_gemv(x, x, factors, factors, 1e-6, weight, None, plan, Activation.SILU, gpu.pdl)
    yield lambda: gemv(x, weight, None, steps, None, gpu.pdl)


def w8_matmuls(
    gpu: GpuTraits, rows: int, outputs: int, inputs: int, gates: tuple[bool, ...] = BOTH
) -> Iterator[Launch]:  # fmt: skip
    """The chosen matmuls of an 8-bit weight, plain and gated."""
    x, space = half(rows, inputs), (torch.empty(1 << 22), torch.zeros(1 << 12, dtype=torch.int32))
    fp8 = FP8 if gpu.capability >= FP8_CAPABILITY else torch.uint8
    blocks, groups = torch.empty(outputs // 16, inputs // 128), torch.empty(outputs, inputs // 128)
    kinds = ((torch.int8, torch.empty(outputs)), (fp8, torch.empty(outputs)), (fp8, blocks), (torch.int8, groups))
    for dtype, scales in kinds:
        weight = half(outputs, inputs, dtype=dtype)
        for gated in gates:
            chooser, activation = (choose_eight_bit_gated, Activation.SILU) if gated else (choose_eight_bit, None)
            plan = chooser(rows, outputs // (1 + gated), inputs, gpu)
            if isinstance(plan, SplitKPlan):
                call = (x, weight, None, plan, *space, activation, gpu.pdl, scales)
                yield lambda call=call: splitk_gemm(*call)
            elif isinstance(plan, GemvPlan):
                call = (x, weight, scales, None, None, plan, activation, gpu.pdl)
                yield lambda call=call: quantized_gemv(*call)


def w8a8_matmuls(gpu: GpuTraits, rows: int, outputs: int, inputs: int) -> Iterator[Launch]:
    """The chosen W8A8 GEMM, with each granularity of scales."""
    space = torch.empty(1 << 22), torch.zeros(1 << 12, dtype=torch.int32)
    blocks = torch.empty(outputs // 16, inputs // 128)
    for dtype, group, scales in (
        (torch.int8, None, torch.empty(outputs)),
        (FP8, None, torch.empty(outputs)),
        (FP8, 128, blocks),
    ):
        if dtype == torch.int8 or gpu.capability >= FP8_CAPABILITY:
            plan = choose_w8a8_gemm(rows, outputs, inputs, "fp8", "block" if group else "output", gpu)
            assert plan is not None
            x = empty_quantized_activation(
                rows, inputs, torch.bfloat16, ActivationFormat(dtype, group), torch.device("cpu")
            )
            call = (x, half(outputs, inputs, dtype=dtype), scales, None, plan, *space, group is not None, gpu.pdl)
            yield lambda call=call: w8a8_matmul(*call)


def gated_w8a8_matmuls(gpu: GpuTraits, rows: int) -> Iterator[Launch]:
    """The gated GEMMs with quantized output, with each granularity of scales, of a network whose tiles fill the GPU."""
    outputs = 2 * 128 * gpu.multiprocessors
    kinds: list[tuple[torch.dtype, EightBitKind, Scaling, int, Tensor]] = [
        (torch.int8, "int8", "output", WHOLE, torch.empty(outputs)),
        (FP8, "fp8", "tensor", KNOWN, torch.empty(outputs)),
        (FP8, "fp8", "block", 128, torch.empty(outputs // 16, 32)),
    ]
    for dtype, kind, scaling, group, scales in kinds:
        if kind == "int8" or gpu.capability >= FP8_CAPABILITY:
            plan = choose_gated_w8a8_gemm(rows, outputs // 2, 4096, kind, scaling, group, gpu)
            assert plan is not None
            to = ActivationFormat(dtype, group if group > 0 else None, torch.ones(1) if group < 0 else None)
            x = empty_quantized_activation(rows, 4096, torch.bfloat16, to, torch.device("cpu"))
            call = (x, half(outputs, 4096, dtype=dtype), scales, None, plan, Activation.SILU, to, gpu.pdl)
            yield lambda call=call: gated_w8a8_gemm(*call)


def rounding(gpu: GpuTraits) -> Iterator[Launch]:
    """Kernels that quantize activations: a separate one, a norm and a gate."""
    kernels, x, weight = triton_kernels(gpu.pdl), half(2, 2048), half(2048)
    for to in (
        ActivationFormat(torch.int8),
        ActivationFormat(FP8),
        ActivationFormat(FP8, 128),
        ActivationFormat(FP8, scale=torch.ones(1)),
    ):
        if to.dtype == torch.int8 or gpu.capability >= FP8_CAPABILITY:
            yield lambda to=to: kernels.quantize(x, to)
            yield lambda to=to: kernels.quantized_norm(x, x, None, weight, 1e-5, to)
            yield lambda to=to: kernels.quantized_gate(x, Activation.SILU, to)


def dequantized(gpu: GpuTraits) -> Iterator[Launch]:
    """Dequantization of weights of every format."""
    fp8 = FP8 if gpu.capability >= FP8_CAPABILITY else torch.uint8
    for dtype, scales in ((fp8, torch.empty(64)), (fp8, torch.empty(4, 4)), (torch.int8, torch.empty(64))):
        values = half(64, 512, dtype=dtype)
        yield lambda values=values, scales=scales: dequantize_eight_bit(values, scales, torch.bfloat16, gpu.pdl)
    words, scales = torch.empty(64, 64, dtype=torch.int32), torch.empty(4, 64).t()
    zeros = torch.empty(4, 64, dtype=torch.uint8).t()
    yield lambda: dequantize_int4(words, scales, zeros, torch.bfloat16, gpu.pdl)


def int4_matmuls(
    gpu: GpuTraits, rows: int, outputs: int, inputs: int, gates: tuple[bool, ...] = BOTH, group: int = 128
) -> Iterator[Launch]:
    """The chosen matmuls of an int4 weight, plain and gated.

    Those of one row also with act-order, and with a norm.
    """
    x, words = half(rows, inputs), torch.empty(outputs, inputs // 8, dtype=torch.int32)
    scales = torch.empty(inputs // group, outputs)
    stored = (words, scales.t(), torch.empty(scales.shape, dtype=torch.uint8).t(), None)
    space = torch.empty(1 << 22), torch.zeros(1 << 12, dtype=torch.int32)
    order = torch.zeros(inputs, dtype=torch.int32)
    for gated in gates:
        chooser, activation = (choose_int4_gated, Activation.SILU) if gated else (choose_int4, None)
        plan = chooser(rows, outputs // (1 + gated), inputs, group, gpu)
        if isinstance(plan, SplitKPlan):
            call = (x, *stored, plan, *space, activation, gpu.pdl)
            yield lambda call=call: int4_splitk(*call)
        elif isinstance(plan, GemvPlan):
            whole = choose_int4_normed(outputs // (1 + gated), inputs, group, gated, gpu, ordered=True)
            if whole is not None:
                normed = (x, *stored, whole, activation, gpu.pdl, x[0], 1e-5, x, x[0], order)
                yield lambda normed=normed: quantized_gemv(*normed)
            for given in (order, None):
                plan = chooser(1, outputs // (1 + gated), inputs, group, gpu, given is not None)
                call = (x, *stored, plan, activation, gpu.pdl)
                yield lambda call=call, given=given: quantized_gemv(*call, order=given)
