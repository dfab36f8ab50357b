"""Gumbel noise inside a Triton kernel, from the integers that `kernels.reference.philox` defines.

Philox4x32-10 (Salmon et al., SC 2011). Triton's own generator returns the same integers, but computes the halves of a
64-bit product by two multiplications, where one wide multiplication is enough.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.fast_math import fast_log2

FIRST = tl.constexpr(0xD2511F53)
SECOND = tl.constexpr(0xCD9E8D57)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def philox_words(seed, choice, position, stream, start, BLOCK: tl.constexpr):
    """Return the Philox words of indices start .. start + BLOCK, [BLOCK] uint32.

    seed: int64; start and BLOCK: multiples of 4. Four indices share one counter, so it is computed once and its words
    are interleaved.
    """
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = (seed >> 32).to(tl.uint32)
    position = zero + position.to(tl.uint32)
    choice = zero + choice.to(tl.uint32)
    c0, c1, c2, c3 = block, position, choice, zero + stream.to(tl.uint32)
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * FIRST
        second = c2.to(tl.uint64) * SECOND
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ key_low
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ key_high
        c3 = first.to(tl.uint32)
        key_low = tl.add(key_low, 0x9E3779B9, sanitize_overflow=False)
        key_high = tl.add(key_high, 0xBB67AE85, sanitize_overflow=False)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK])


@triton.jit
def gumbel(words):
    """Convert random words to Gumbel noise, float32.

    words: uint32. The noise is -log(-log(u)) with u = ((word >> 9) + 0.5) * 2^-23.

    The GPU's fast logarithm has an absolute error near 1, where -log(u) is tiny and the noise is largest: there the
    series of log(1 - w) in w = 1 - u is used instead. The error of the noise is about 5e-6. The word is inserted into a
    float's mantissa, because an integer conversion is as slow as a logarithm; u and w are exact.
    """
    u = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    w = 1.0 - u
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * 0.2))))
    return LN_2 * -fast_log2(tl.where(w < 0.03125, series, -LN_2 * fast_log2(u)))
