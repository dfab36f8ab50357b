"""Words of quantized weights times inputs, on a thread's ordinary cores.

A word holds four bytes or eight levels of four bits. On a GPU its numbers become pairs of float16, which are multiplied
by pairs of inputs and added, two or four of them, in float16; what follows is float32. Inputs are brought into range
first: those of a thread's words side by side are multiplied by one power of two. A product is rounded by 2^-11 of
itself or 2^-30 of the largest possible among these, whichever is more. In bfloat16 that is less than the rounding of
the result, in float16 up to twice as much.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import INTERPRETED

NIBBLES, FLOATS, INTEGERS, BITS = 0, 1, 2, 3
"""What a word holds: levels of four bits in the order of `nibble_order`, numbers of float8 e4m3, signed bytes, or
float8 for a GPU that does not know it."""

_NIBBLE_CODE = tl.constexpr("""{
    .reg .b32 a, b, c, d, s, sixteenth;
    .reg .b16 low, high;
    .reg .f32 f, g;
    mov.b32 sixteenth, 0x2C002C00;
    shr.u32 s, $1, 8;
    lop3.b32 a, $1, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, $1, 0x00F000F0, 0x64006400, 0xEA;
    lop3.b32 c, s, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 d, s, 0x00F000F0, 0x64006400, 0xEA;
    add.rn.f16x2 a, a, $6;
    fma.rn.f16x2 b, b, sixteenth, $7;
    add.rn.f16x2 c, c, $6;
    fma.rn.f16x2 d, d, sixteenth, $7;
    mul.rn.f16x2 a, a, $2;
    fma.rn.f16x2 a, b, $3, a;
    fma.rn.f16x2 a, c, $4, a;
    fma.rn.f16x2 a, d, $5, a;
    mov.b32 {low, high}, a;
    cvt.f32.f16 f, low;
    cvt.f32.f16 g, high;
    add.f32 $0, f, g;
}""")
"""A level becomes the lowest bits of a float16 from 1024 on, where these count whole numbers, or the next four, which
count by 16. What they are too large by is subtracted together with the zero point."""
_PAIRS_TIMES = """
    mul.rn.f16x2 a, a, $2;
    fma.rn.f16x2 a, b, $3, a;
    mov.b32 {low, high}, a;
    cvt.f32.f16 f, low;
    cvt.f32.f16 g, high;
    add.f32 $0, f, g;
}"""
_HEAD = """{
    .reg .b32 a, b, c, d;
    .reg .b16 low, high;
    .reg .f32 f, g;"""
_FLOAT_CODE = tl.constexpr(
    _HEAD
    + """
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;"""
    + _PAIRS_TIMES
)
_INTEGER_CODE = tl.constexpr(
    _HEAD
    + """
    xor.b32 c, $1, 0x80808080;
    mov.b32 d, 0x64806480;
    prmt.b32 a, c, 0x64646464, 0x4140;
    prmt.b32 b, c, 0x64646464, 0x4342;
    sub.rn.f16x2 a, a, d;
    sub.rn.f16x2 b, b, d;"""
    + _PAIRS_TIMES
)
_BIT_CODE = tl.constexpr(
    _HEAD
    + """
    prmt.b32 a, $1, 0, 0x1404;
    prmt.b32 b, $1, 0, 0x3424;
    shr.u32 c, a, 1;
    shr.u32 d, b, 1;
    and.b32 c, c, 0x3F803F80;
    and.b32 d, d, 0x3F803F80;
    lop3.b32 a, a, 0x80008000, c, 0xEA;
    lop3.b32 b, b, 0x80008000, d, 0xEA;"""
    + _PAIRS_TIMES
)
"""The bits of e4m3 become those of a float16, whose exponents are biased by 8 more: a number's 2^-8."""


@triton.jit
def in_words(vector, KIND: tl.constexpr, RUN: tl.constexpr):
    """Bring inputs into the order of the words' numbers.

    Returns [words, 4, 2], or [words, 2, 2] of bytes; the last dimension is that of a pair. RUN: `nibble_order.run_of`,
    for levels.
    """
    if KIND == 0:
        blocks = tl.reshape(vector, [vector.shape[0] // (32 * RUN), RUN, 4, 4, 2])
        return tl.reshape(tl.permute(blocks, (0, 3, 1, 2, 4)), [vector.shape[0] // 8, 4, 2])
    else:
        return tl.reshape(vector, [vector.shape[0] // 4, 2, 2])


@triton.jit
def prepared(vector, KIND: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr):
    """Prepare float32 inputs for `word_sums`.

    Each SPAN words share a power of two. Returns the inputs, pairs of float16 in int32 on a GPU; and what the sums of
    each span are to be multiplied by, [words / SPAN].
    """
    x = in_words(vector, KIND, RUN)
    WORDS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1]
    if INTERPRETED:
        if KIND == 0:
            x = tl.reshape(x, [WORDS, 2, 2, 2])
        return x, tl.full([WORDS // SPAN], 1.0, tl.float32)
    else:
        # The largest is made less than 2^TOP, so that no sum of a word exceeds float16's range.
        TOP: tl.constexpr = 8 if KIND == 0 else 6 if KIND == 1 else 7 if KIND == 2 else 14
        BACK: tl.constexpr = TOP - 1 - (8 if KIND == 3 else 0)
        spans = tl.reshape(x, [WORDS // SPAN, SPAN * PAIRS * 2])
        # As float32 stores it, where 127 stands for 0; at least 16, so that both powers of two below exist.
        exponent = tl.maximum(tl.max(tl.abs(spans), 1).to(tl.int32, bitcast=True) >> 23, 16)
        factor = ((253 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
        back = ((exponent - BACK) << 23).to(tl.float32, bitcast=True)
        halves = tl.reshape((spans * factor[:, None]).to(tl.float16), [WORDS, PAIRS, 2])
        low, high = tl.split(halves.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
        pairs = low | (high << 16)
        return tl.reshape(pairs, [WORDS, 2, 2]) if KIND == 0 else pairs, back


@triton.jit
def _level(words, PLACE: tl.constexpr, zeros):
    return (((words >> (4 * PLACE)) & 15) - zeros).to(tl.float32)


@triton.jit
def _number(words, PLACE: tl.constexpr, KIND: tl.constexpr):
    byte = ((words >> (8 * PLACE)) & 255).to(tl.uint8)
    return byte.to(tl.int8 if KIND == 2 else tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _interpreted_sums(words, x, zeros, KIND: tl.constexpr):
    even, odd = tl.split(x)
    x0, x1 = tl.split(even)
    y0, y1 = tl.split(odd)
    if KIND == 0:
        # Pairs are four places apart.
        a, c = tl.split(x0)
        b, d = tl.split(x1)
        e, g = tl.split(y0)
        f, h = tl.split(y1)
        sums = _level(words, 0, zeros) * a + _level(words, 1, zeros) * b
        sums += _level(words, 2, zeros) * c + _level(words, 3, zeros) * d
        sums += _level(words, 4, zeros) * e + _level(words, 5, zeros) * f
        sums += _level(words, 6, zeros) * g + _level(words, 7, zeros) * h
    else:
        sums = _number(words, 0, KIND) * x0 + _number(words, 1, KIND) * y0
        sums += _number(words, 2, KIND) * x1 + _number(words, 3, KIND) * y1
    return sums


@triton.jit
def word_sums(words, x, zeros, KIND: tl.constexpr):
    """Return the sum of each word's products with its inputs, [ROWS, words] float32.

    words: [ROWS, words] int32; x: from `prepared`; zeros: the zero point of each word's levels, int32, at most 63.
    """
    if INTERPRETED:
        return _interpreted_sums(words, x, zeros, KIND)
    elif KIND == 0:
        # Minus 1024 and the zero point, and minus 64 and the zero point, twice each.
        first = zeros * 0x00010001 + tl.cast(0xE400E400 - (1 << 32), tl.int32)
        second = zeros * 0x00100010 + tl.cast(0xD400D400 - (1 << 32), tl.int32)
        lower, upper = tl.split(x)
        x0, x2 = tl.split(lower)
        x1, x3 = tl.split(upper)
        given = [words, x0[None, :], x1[None, :], x2[None, :], x3[None, :], first, second]
        return tl.inline_asm_elementwise(_NIBBLE_CODE, "=f,r,r,r,r,r,r,r", given, tl.float32, True, 1)
    else:
        CODE: tl.constexpr = _FLOAT_CODE if KIND == 1 else _INTEGER_CODE if KIND == 2 else _BIT_CODE
        x0, x1 = tl.split(x)
        given = [words, x0[None, :], x1[None, :]]
        return tl.inline_asm_elementwise(CODE, "=f,r,r,r", given, tl.float32, True, 1)
