"""Unpack int4 values to 16 bits, two at a time.

A pair of values becomes the low mantissa bits of two floats from 128 on (1024 in float16), where the unit in the last
place is 1, and the offset is subtracted: conversion instructions are far slower.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import INTERPRETED

SUBTRACT = """{{
    .reg .b32 a, b, c, d, s, one;
    mov.b32 one, {one};
    lop3.b32 a, $4, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 4;
    lop3.b32 b, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 8;
    lop3.b32 c, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 12;
    lop3.b32 d, s, 0x000F000F, {base}, 0xEA;
    fma.rn.{dtype} $0, a, one, $6;
    fma.rn.{dtype} $1, b, one, $6;
    fma.rn.{dtype} $2, c, one, $6;
    fma.rn.{dtype} $3, d, one, $6;
}}"""
RAISE = """{{
    .reg .b32 s;
    lop3.b32 $0, $4, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 4;
    lop3.b32 $1, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 8;
    lop3.b32 $2, s, 0x000F000F, {base}, 0xEA;
    shr.u32 s, $4, 12;
    lop3.b32 $3, s, 0x000F000F, {base}, 0xEA;
}}"""
SUBTRACT_BFLOAT16 = tl.constexpr(SUBTRACT.format(base="0x43004300", one="0x3F803F80", dtype="bf16x2"))
SUBTRACT_FLOAT16 = tl.constexpr(SUBTRACT.format(base="0x64006400", one="0x3C003C00", dtype="f16x2"))

RAISE_BFLOAT16 = tl.constexpr(RAISE.format(base="0x43004300"))
RAISE_FLOAT16 = tl.constexpr(RAISE.format(base="0x64006400"))


@triton.jit
def unpack_pair(words, zeros, PLACE: tl.constexpr, dtype: tl.constexpr):
    """Return the values at indices INDEX and INDEX + 4 of each word, minus zero points, [..., 2]."""
    low = ((words >> (4 * PLACE)) & 15) - zeros
    high = ((words >> (4 * PLACE + 16)) & 15) - zeros
    return tl.join(low.to(dtype), high.to(dtype))


@triton.jit
def unpack_int4(words, zeros, dtype: tl.constexpr):
    """Return all values of words minus zero points, [..., 2, 2, 2].

    The dimensions are bits 2, 0 and 1 of an index. words, zeros: int32 of one shape, zero points at most 63. Such small
    integers are exact in every dtype. All values of a word stay in its thread.
    """
    if INTERPRETED or dtype == tl.float32:
        p0, p1 = unpack_pair(words, zeros, 0, dtype), unpack_pair(words, zeros, 1, dtype)
        p2, p3 = unpack_pair(words, zeros, 2, dtype), unpack_pair(words, zeros, 3, dtype)
    else:
        BFLOAT: tl.constexpr = dtype == tl.bfloat16
        # Minus 128 (1024) and the zero point, twice.
        less = zeros + (0xC300 if BFLOAT else 0xE400)
        less = less | (less << 16)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            SUBTRACT_BFLOAT16 if BFLOAT else SUBTRACT_FLOAT16,
            "=r,=r,=r,=r,r,r,r,r",
            [tl.join(words, words), tl.join(less, less)],
            (tl.int16, tl.int16, tl.int16, tl.int16),
            True,
            2,
        )
    if not INTERPRETED and dtype != tl.float32:
        p0, p1 = p0.to(dtype, bitcast=True), p1.to(dtype, bitcast=True)
        p2, p3 = p2.to(dtype, bitcast=True), p3.to(dtype, bitcast=True)
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def raised_zero(zeros, dtype: tl.constexpr):
    """Return the values that `unpack_raised_int4` returns for zero points, in float32."""
    BASE: tl.constexpr = 0 if INTERPRETED or dtype == tl.float32 else 128 if dtype == tl.bfloat16 else 1024
    return (zeros + BASE).to(tl.float32)


@triton.jit
def unpack_raised_int4(words, dtype: tl.constexpr):
    """Return all values of words plus 128 (1024 in float16, 0 in float32): `unpack_int4` without the subtraction.

    Returns [..., 2, 2, 2], as `unpack_int4`.
    """
    if INTERPRETED or dtype == tl.float32:
        return unpack_int4(words, tl.zeros_like(words), dtype)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            RAISE_BFLOAT16 if dtype == tl.bfloat16 else RAISE_FLOAT16,
            "=r,=r,=r,=r,r,r",
            [tl.join(words, words)],
            (tl.int16, tl.int16, tl.int16, tl.int16),
            True,
            2,
        )
        p0, p1 = p0.to(dtype, bitcast=True), p1.to(dtype, bitcast=True)
        p2, p3 = p2.to(dtype, bitcast=True), p3.to(dtype, bitcast=True)
        return tl.join(tl.join(p0, p1), tl.join(p2, p3))
