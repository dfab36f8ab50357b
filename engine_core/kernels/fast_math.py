"""Elementary functions as single GPU instructions.

They omit Triton's handling of cases that cannot occur here. Triton's interpreter cannot run such instructions and uses
Triton's own functions instead.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def fast_log2(x):
    """Return the base-2 logarithm of normal positive float32 values.

    The error is 2^-22, absolute between 0.5 and 2 and relative elsewhere.
    """
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def fast_exp2(x):
    """Return 2^x of float32, flushing subnormal results to 0.

    The relative error is 2^-22.
    """
    if INTERPRETED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def nan_max(x, y):
    """Return the maximum of two values, propagating NaN.

    By default GPUs return the other operand, which would hide a NaN from all later operations.
    """
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_float32(stored):
    """Convert float32, bfloat16 or float16 to float32.

    A bfloat16 is the upper half of its float32, so two in one register take one instruction each.
    """
    if INTERPRETED or stored.dtype != tl.bfloat16:
        result = stored.to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [stored], tl.float32, True, 2
        )
    return result


@triton.jit
def int8_to_float32(stored):
    """Convert int8 to float32, four at a time.

    The GPU's conversions are slow: 16 per cycle and SM. Instead a byte becomes the low mantissa bits of a float32 from
    2^23 on, where the unit in the last place is 1, and 2^23 is subtracted.
    """
    if INTERPRETED:
        result = stored.to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, a, b, c, d;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 a, bytes, 0x4B000000, 0x7440;
            prmt.b32 b, bytes, 0x4B000000, 0x7441;
            prmt.b32 c, bytes, 0x4B000000, 0x7442;
            prmt.b32 d, bytes, 0x4B000000, 0x7443;
            add.f32 $0, a, 0fCB000080;
            add.f32 $1, b, 0fCB000080;
            add.f32 $2, c, 0fCB000080;
            add.f32 $3, d, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r",
            [stored],
            tl.float32,
            True,
            4,
        )
    return result


@triton.jit
def ge_float32(x, y):
    """Return x >= y as float32, 1.0 or 0.0."""
    if INTERPRETED:
        result = (x >= y).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise("set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    return result


@triton.jit
def fast_div(x, y):
    """Divide x by a positive scalar y, almost always with correct rounding.

    x is multiplied by the reciprocal of y and corrected once by the exact remainder. The result is correctly rounded
    except for about one in a million (Markstein, 1990), without the branches of the exact division. Quotients too large
    for the remainder, including infinite ones, stay uncorrected.
    """
    if INTERPRETED:
        result = tl.div_rn(x, y)
    else:
        reciprocal = tl.minimum(tl.div_rn(1.0, y), 3e38)
        guess = x * reciprocal
        remainder = tl.fma(-guess, y, x)
        result = tl.where(tl.abs(guess) < 1e30, tl.fma(remainder, reciprocal, guess), guess)
    return result
