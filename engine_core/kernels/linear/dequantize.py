"""Dequantization of weights to 16 bits, for library GEMMs.

A program dequantizes part of one output's weights. Oracles: `dequantized` of
`layers.quantized.eight_bit_linear.EightBitLinear` and of `int4_linear.Int4Linear`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.eight_bit_weights import cast_weights, scale_group, scale_height
from tandem.engine_core.kernels.linear.int4_layout import PER_WORD, group_and_run
from tandem.engine_core.kernels.linear.int4_unpack import unpack_int4

BLOCK, WARPS = 2048, 4


@triton.jit
def _dequantize_eight_bit_kernel(
    out_ptr,
    values_ptr,
    scales_ptr,
    inputs,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < inputs
    values = cast_weights(tl.load(values_ptr + row * inputs + offs, mask=mask, other=0.0), tl.float32)
    if GROUP > 0:
        offs_s = (row // HEIGHT) * tl.cdiv(inputs, GROUP) + offs // GROUP
        scales = tl.load(scales_ptr + offs_s, mask=mask, other=0.0)
    else:
        scales = tl.load(scales_ptr + row)
    # The previous kernel may still read the memory that is written here.
    wait_for_previous(PDL)
    tl.store(out_ptr + row * inputs + offs, (values * scales).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_int4_kernel(
    out_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    inputs,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    offs_w = first // 8 + tl.arange(0, BLOCK // 8)
    mask_w = offs_w < inputs // 8
    words = tl.load(words_ptr + row * (inputs // 8) + offs_w, mask=mask_w, other=0)
    begin = offs_w // (4 * RUN) * (32 * RUN) + offs_w % RUN * 32 if RUN > 0 else offs_w * 8
    group = (begin // GROUP) * tl.num_programs(0).to(tl.int64) + row
    zeros = tl.load(zeros_ptr + group, mask=mask_w, other=0).to(tl.int32)
    scales = tl.load(scales_ptr + group, mask=mask_w, other=0.0)
    levels = unpack_int4(words, zeros, tl.float32)
    weights = (levels * scales[:, None, None, None]).to(out_ptr.dtype.element_ty)
    if RUN > 0:
        # From the words' order to that of the inputs: bit fields t, j, e, c, d of an input index.
        weights = tl.permute(tl.reshape(weights, [BLOCK // (32 * RUN), 4, RUN, 2, 2, 2]), (0, 2, 5, 4, 1, 3))
    else:
        weights = tl.permute(weights, (0, 1, 3, 2))
    offs = first + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    tl.store(out_ptr + row * inputs + offs, tl.reshape(weights, [BLOCK]), mask=offs < inputs)


def dequantize_eight_bit(values: Tensor, scales: Tensor, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """Return dequantized weights, [outputs, inputs].

    values: [outputs, inputs], int8, float8_e4m3fn or its bits as uint8; scales: float32, per output, per block of 16
    outputs and 128 inputs, [outputs / 16, inputs / 128], rounded up, or per output and group, [outputs, groups].
    """
    outputs, inputs = values.shape
    out = torch.empty(outputs, inputs, device=values.device, dtype=dtype)
    _dequantize_eight_bit_kernel[(outputs, triton.cdiv(inputs, BLOCK))](
        out,
        values,
        scales,
        inputs,
        HEIGHT=scale_height(values, scales),
        GROUP=scale_group(values, scales),
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def dequantize_int4(words: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """Return dequantized int4 weights, [outputs, inputs].

    words, scales, zeros: as in `quantized_gemv`, with any group size that is a multiple of 8.
    """
    outputs, inputs = words.shape[0], words.shape[1] * PER_WORD
    group, run = group_and_run(words, scales, zeros)
    out = torch.empty(outputs, inputs, device=words.device, dtype=dtype)
    _dequantize_int4_kernel[(outputs, triton.cdiv(inputs, BLOCK))](
        out,
        words,
        scales,
        zeros,
        inputs,
        GROUP=group,
        RUN=run,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
