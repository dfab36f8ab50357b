"""Quantized weights as numbers in 16 bits, for a library's product.

A program makes part of an output's weights. Oracles: `dequantized` of `layers.quantized.byte_linear.ByteLinear` and of
`nibble_linear.NibbleLinear`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.linear.gemv import widened

BLOCK, WARPS = 2048, 4


@triton.jit
def _dequantize_bytes_kernel(
    out_ptr, values_ptr, scales_ptr, inputs, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < inputs
    values = widened(tl.load(values_ptr + row * inputs + offs, mask=mask, other=0.0), tl.float32)
    if BLOCKS:
        scales = tl.load(scales_ptr + (row // 16) * tl.cdiv(inputs, 128) + offs // 128, mask=mask, other=0.0)
    else:
        scales = tl.load(scales_ptr + row)
    # The kernel before may still read the memory that is written here.
    wait_for_previous(PDL)
    tl.store(out_ptr + row * inputs + offs, (values * scales).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_nibbles_kernel(
    out_ptr, words_ptr, scales_ptr, zeros_ptr, inputs, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    offs_w = first // 8 + tl.arange(0, BLOCK // 8)
    mask_w = offs_w < inputs // 8
    words = tl.load(words_ptr + row * (inputs // 8) + offs_w, mask=mask_w, other=0)
    group = row * (inputs // GROUP) + offs_w * 8 // GROUP
    zeros = tl.load(zeros_ptr + group, mask=mask_w, other=0).to(tl.int32)
    scales = tl.load(scales_ptr + group, mask=mask_w, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # A thread unpacks whole words, which it loads once.
    even = tl.join(
        tl.join(number(words, zeros, scales, 0, dtype), number(words, zeros, scales, 4, dtype)),
        tl.join(number(words, zeros, scales, 2, dtype), number(words, zeros, scales, 6, dtype)),
    )
    odd = tl.join(
        tl.join(number(words, zeros, scales, 1, dtype), number(words, zeros, scales, 5, dtype)),
        tl.join(number(words, zeros, scales, 3, dtype), number(words, zeros, scales, 7, dtype)),
    )
    numbers = tl.reshape(tl.join(even, odd), [BLOCK])
    offs = first + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    tl.store(out_ptr + row * inputs + offs, numbers, mask=offs < inputs)


@triton.jit
def number(words, zeros, scales, PLACE: tl.constexpr, dtype: tl.constexpr):
    """Return the weights in one place of words."""
    return ((((words >> (4 * PLACE)) & 15) - zeros).to(tl.float32) * scales).to(dtype)


def dequantize_bytes(values: Tensor, scales: Tensor, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """Return weights as numbers, [outputs, inputs].

    values: [outputs, inputs], int8, float8_e4m3fn or the bits of that as uint8; scales: float32, of each output or of
    blocks of 16 outputs and 128 inputs, [outputs / 16, inputs / 128], rounded up.
    """
    outputs, inputs = values.shape
    out = torch.empty(outputs, inputs, device=values.device, dtype=dtype)
    _dequantize_bytes_kernel[(outputs, triton.cdiv(inputs, BLOCK))](
        out,
        values,
        scales,
        inputs,
        BLOCKS=scales.ndim == 2,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def dequantize_nibbles(words: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """Return weights of four bits as numbers, [outputs, inputs].

    words: [outputs, inputs / 8] int32, see `quantization.nibbles`; scales: [outputs, groups] float32; zeros: [outputs,
    groups] uint8.
    """
    outputs, inputs = words.shape[0], words.shape[1] * 8
    out = torch.empty(outputs, inputs, device=words.device, dtype=dtype)
    _dequantize_nibbles_kernel[(outputs, triton.cdiv(inputs, BLOCK))](
        out,
        words,
        scales,
        zeros,
        inputs,
        GROUP=inputs // scales.shape[1],
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
