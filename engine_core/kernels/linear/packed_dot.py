"""Dot products of packed quantized weights and inputs on CUDA cores.

A 32-bit word holds four 8-bit or eight int4 values. They are converted to pairs of float16, multiplied by pairs of
inputs and accumulated, eight at a time, in float16; the rest is float32. Inputs are scaled into range first, each 128
by one power of two. A sum has an error of 2^-11 of itself or 2^-28 of the largest possible sum, whichever is larger.
For many inputs the error of a result is less than half a bfloat16 rounding, and up to three float16 roundings.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

INT4, FP8, INT8, FP8_BITS = 0, 1, 2, 3
"""Contents of a word: int4 values in the order of `int4_layout`, float8 e4m3, int8, or float8 e4m3 bits for GPUs
without FP8 support."""

_LEVELS_AS_PAIRS = """
    shr.u32 s, WORD, 8;
    lop3.b32 p0, WORD, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 p1, WORD, 0x00F000F0, 0x64006400, 0xEA;
    lop3.b32 p2, s, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 p3, s, 0x00F000F0, 0x64006400, 0xEA;
    mov.b32 s, 0x2C002C00;
    add.rn.f16x2 p0, p0, FIRST;
    fma.rn.f16x2 p1, p1, s, SECOND;
    add.rn.f16x2 p2, p2, FIRST;
    fma.rn.f16x2 p3, p3, s, SECOND;"""
"""An int4 value becomes the low mantissa bits of a float16 from 1024 on, where the unit in the last place is 1, or the
next four bits, with a unit of 16. The offset is subtracted together with the zero point."""
_FLOATS_AS_PAIRS = """
    mov.b32 {low, high}, WORD;
    cvt.rn.f16x2.e4m3x2 p0, low;
    cvt.rn.f16x2.e4m3x2 p1, high;"""
_INTEGERS_AS_PAIRS = """
    xor.b32 s, WORD, 0x80808080;
    mov.b32 p2, 0x64806480;
    prmt.b32 p0, s, 0x64646464, 0x4140;
    prmt.b32 p1, s, 0x64646464, 0x4342;
    sub.rn.f16x2 p0, p0, p2;
    sub.rn.f16x2 p1, p1, p2;"""
"""A byte plus 128 becomes the low mantissa bits of a float16 from 1024 on, where the unit in the last place is 1."""
_BITS_AS_PAIRS = """
    prmt.b32 p0, WORD, 0, 0x1404;
    prmt.b32 p1, WORD, 0, 0x3424;
    shr.u32 p2, p0, 1;
    shr.u32 p3, p1, 1;
    and.b32 p2, p2, 0x3F803F80;
    and.b32 p3, p3, 0x3F803F80;
    lop3.b32 p0, p0, 0x80008000, p2, 0xEA;
    lop3.b32 p1, p1, 0x80008000, p3, 0xEA;"""
"""e4m3 bits shifted into a float16, whose exponent bias is larger by 8, yield the value times 2^-8."""


def _sum_of_products(unpacked: str, pairs: int, words: int) -> tl.constexpr:
    """Return the assembly for the dot product of a few words.

    Its operands are the words, the inputs of each in pairs, and for int4 the offsets to subtract (`packed_dot`).
    unpacked: template that computes p0, p1 and so on from WORD.
    """
    after = 1 + words * (1 + pairs)
    lines = [".reg .b32 p0, p1, p2, p3, s, sum;", ".reg .b16 low, high;", ".reg .f32 f, g;"]
    for word in range(words):
        own = unpacked.replace("WORD", f"${1 + word}")
        lines.append(own.replace("FIRST", f"${after}").replace("SECOND", f"${after + 1}"))
        for pair in range(pairs):
            x = f"${1 + words + word * pairs + pair}"
            first = word == pair == 0
            lines.append(f"mul.rn.f16x2 sum, p0, {x};" if first else f"fma.rn.f16x2 sum, p{pair}, {x}, sum;")
    lines += ["mov.b32 {low, high}, sum;", "cvt.f32.f16 f, low;", "cvt.f32.f16 g, high;", "add.f32 $0, f, g;"]
    return tl.constexpr("{" + "\n".join(lines) + "}")


_INT4_CODE, _INT4_PAIR_CODE = (_sum_of_products(_LEVELS_AS_PAIRS, 4, words) for words in (1, 2))
_FLOATS_CODE = _sum_of_products(_FLOATS_AS_PAIRS, 2, 4)
_INTEGERS_CODE = _sum_of_products(_INTEGERS_AS_PAIRS, 2, 4)
_BITS_CODE = _sum_of_products(_BITS_AS_PAIRS, 2, 4)


def words_per_sum(kind: int, span: int) -> int:
    """Return the number of words accumulated in float16.

    span: adjacent words that are scaled together, 1 or 4.
    """
    return min(span, 2 if kind == INT4 else 4)


_SHARING = tl.constexpr(128)
"""Inputs that share a power of two."""


@triton.jit
def _in_words(pairs, KIND: tl.constexpr, RUN: tl.constexpr):
    """Reorder input pairs to match the words.

    pairs: [inputs / 2]; RUN: `int4_layout.run_length`, for int4. Returns [words, 4], or [words, 2] for 8-bit weights.
    """
    COUNT: tl.constexpr = pairs.shape[0]
    if KIND == 0:
        blocks = tl.reshape(pairs, [COUNT // (16 * RUN), RUN, 4, 4])
        return tl.reshape(tl.permute(blocks, (0, 3, 1, 2)), [COUNT // 4, 4])
    else:
        return tl.reshape(pairs, [COUNT // 2, 2])


@triton.jit
def _of_words(pairs, KIND: tl.constexpr, COUNT: tl.constexpr):
    """Split pairs of inputs, [words, PAIRS].

    Returns those of every COUNT-th word, pair by pair, and then those of the following words, each [words / COUNT].
    """
    GROUPS: tl.constexpr = pairs.shape[0] // COUNT
    if KIND == 0:
        even, odd = tl.split(tl.reshape(pairs, [GROUPS, COUNT, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        if COUNT == 1:
            return tl.reshape(a, [GROUPS]), tl.reshape(b, [GROUPS]), tl.reshape(c, [GROUPS]), tl.reshape(d, [GROUPS])
        else:
            a0, a1 = tl.split(a)
            b0, b1 = tl.split(b)
            c0, c1 = tl.split(c)
            d0, d1 = tl.split(d)
            return a0, b0, c0, d0, a1, b1, c1, d1
    else:
        a, b = tl.split(tl.reshape(pairs, [GROUPS, 2, 2, 2]))
        even_a, odd_a = tl.split(a)
        even_b, odd_b = tl.split(b)
        a0, a2 = tl.split(even_a)
        a1, a3 = tl.split(odd_a)
        b0, b2 = tl.split(even_b)
        b1, b3 = tl.split(odd_b)
        return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def prepare_inputs(vector, KIND: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr, COUNT: tl.constexpr):
    """Prepare float32 inputs for `packed_dot`.

    RUN: as in `_in_words`; SPAN: words that are scaled together; COUNT: `words_per_sum`. Returns the inputs in pairs of
    float16, as int32, each 128 multiplied by a power of two; and the factors that undo this for each span's sums,
    [words / SPAN].
    """
    K: tl.constexpr = vector.shape[0]
    SPANS: tl.constexpr = K // (8 if KIND == 0 else 4) // SPAN
    # The largest input is scaled below 2^TOP, so no sum of eight products overflows float16.
    TOP: tl.constexpr = 7 if KIND == 0 else 4 if KIND == 1 else 5 if KIND == 2 else 12
    BACK: tl.constexpr = TOP - 1 - (8 if KIND == 3 else 0)
    BLOCK: tl.constexpr = min(_SHARING, K)
    blocks = tl.reshape(vector, [K // BLOCK, BLOCK])
    # Biased exponent as stored in float32, where 127 means 0; at least 16, so that both powers of two below exist.
    exponent = tl.maximum(tl.max(tl.abs(blocks), 1).to(tl.int32, bitcast=True) >> 23, 16)
    factor = ((253 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - BACK) << 23).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.reshape(blocks * factor[:, None], [K // 2, 2]))
    pairs = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    back = tl.reshape(tl.broadcast_to(back[:, None], [K // BLOCK, SPANS * BLOCK // K]), [SPANS])
    return _of_words(_in_words(pairs, KIND, RUN), KIND, COUNT), back


@triton.jit
def _repeated(x, TIMES: tl.constexpr):
    """Repeat each element of the last dimension of [ROWS, N]."""
    if TIMES == 1:
        return x
    else:
        wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], TIMES])
        return tl.reshape(wide, [x.shape[0], x.shape[1] * TIMES])


@triton.jit
def packed_dot(words, x, zeros, KIND: tl.constexpr, SPAN: tl.constexpr, COUNT: tl.constexpr):
    """Return the dot products of each COUNT words with their inputs.

    words: [ROWS, words] int32; x: from `prepare_inputs`; zeros: of int4 the zero point of each span, [ROWS, words /
    SPAN] uint8, at most 63; SPAN, COUNT: as in `prepare_inputs`. Returns [ROWS, words / COUNT] float32.
    """
    ROWS: tl.constexpr = words.shape[0]
    if KIND == 0:
        # Minus 1024 and the zero point, and minus 64 and the zero point, twice each.
        zeros = zeros.to(tl.int32)
        first = _repeated(zeros * 0x00010001 + tl.cast(0xE400E400 - (1 << 32), tl.int32), SPAN // COUNT)
        second = _repeated(zeros * 0x00100010 + tl.cast(0xD400D400 - (1 << 32), tl.int32), SPAN // COUNT)
        if COUNT == 1:
            a, b, c, d = x
            given = [words, a[None, :], b[None, :], c[None, :], d[None, :], first, second]
            return tl.inline_asm_elementwise(_INT4_CODE, "=f,r,r,r,r,r,r,r", given, tl.float32, True, 1)
        else:
            a, b, c, d, e, f, g, h = x
            left, right = tl.split(tl.reshape(words, [ROWS, words.shape[1] // 2, 2]))
            given = [left, right, a[None, :], b[None, :], c[None, :], d[None, :]]
            given += [e[None, :], f[None, :], g[None, :], h[None, :], first, second]
            return tl.inline_asm_elementwise(_INT4_PAIR_CODE, "=f,r,r,r,r,r,r,r,r,r,r,r,r", given, tl.float32, True, 1)
    else:
        CODE: tl.constexpr = _FLOATS_CODE if KIND == 1 else _INTEGERS_CODE if KIND == 2 else _BITS_CODE
        a, b, c, d, e, f, g, h = x
        even, odd = tl.split(tl.reshape(words, [ROWS, words.shape[1] // 4, 2, 2]))
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        given = [word0, word1, word2, word3, a[None, :], b[None, :], c[None, :], d[None, :]]
        given += [e[None, :], f[None, :], g[None, :], h[None, :]]
        return tl.inline_asm_elementwise(CODE, "=f,r,r,r,r,r,r,r,r,r,r,r,r", given, tl.float32, True, 1)
