"""Elementary functions as single GPU instructions.

They leave out Triton's code for cases that cannot occur here. Triton's interpreter cannot run such instructions; under
it, Triton's own functions take their place.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def fast_log2(x):
    """Return the binary logarithm of normal positive float32 numbers.

    The error is 2^-22, absolute between 0.5 and 2 and relative elsewhere.
    """
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def fast_exp2(x):
    """Return 2^x of float32, or 0 where that is not a normal number.

    The relative error is 2^-22.
    """
    if INTERPRETED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def at_least(x, y):
    """Return 1.0 where x >= y and 0.0 elsewhere, float32."""
    if INTERPRETED:
        result = (x >= y).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise("set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    return result


@triton.jit
def quotient(x, y):
    """Divide x by a positive scalar y, almost always with correct rounding.

    x is multiplied by the reciprocal of y, and the product corrected once by the exact remainder. The result is the
    correctly rounded quotient but for about one in a million (Markstein, 1990), without the branches of the exact
    division. Quotients too large for the remainder, including infinite ones, stay uncorrected.
    """
    if INTERPRETED:
        result = tl.div_rn(x, y)
    else:
        reciprocal = tl.minimum(tl.div_rn(1.0, y), 3e38)
        guess = x * reciprocal
        remainder = tl.fma(-guess, y, x)
        result = tl.where(tl.abs(guess) < 1e30, tl.fma(remainder, reciprocal, guess), guess)
    return result
