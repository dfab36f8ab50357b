"""Division of a row's blocks among programs, and how results are combined.

The attention kernels share the division; the combination is that of `paged_decode`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def split_blocks(length, lowest, split, splits, least_blocks, BLOCK: tl.constexpr):
    """Return a program's range of blocks and the number of programs in use.

    Blocks of `BLOCK` positions from the one of `lowest` to the one of `length - 1` are shared evenly by `splits`
    programs, but each takes at least `least_blocks`, so that the last programs may have none and are not in use. The
    range is the first block and the one after the last. split: number of the program.
    """
    skipped = lowest // BLOCK
    blocks = tl.cdiv(length, BLOCK) - skipped
    share = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
    first = split * share
    last = tl.minimum(first + share, blocks)
    return first + skipped, last + skipped, tl.cdiv(blocks, share)


@triton.jit
def combine_splits(
    partial_ptr,
    log_sums_ptr,
    used,
    splits,
    beyond,
    SPARES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weigh the outputs of splits by their softmax sums.

    used: number of splits; beyond: distance from where the outputs of a row's own `splits` end to those of its spare
    programs. Returns [ROWS, WIDE] float32.
    """
    g = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, used, CHUNK):
        s = start + tl.arange(0, CHUNK)
        mask = (s < used)[:, None] & (g < GROUP)[None, :]
        place = s
        if SPARES:
            place = tl.where(s < splits, s, s + beyond)
        offs = place[:, None] * GROUP + g[None, :]
        # Bypass the first-level cache, which may hold what an earlier launch left there.
        log_sum = tl.load(log_sums_ptr + offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            partial_ptr + offs[:, :, None] * D + d[None, None, :],
            mask=mask[:, :, None] if WIDE == D else mask[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Unused heads of the tile have no weight at all; a finite floor keeps them from giving NaN.
        new_best = tl.maximum(tl.maximum(best, tl.max(log_sum, axis=0)), -1e30)
        shrink = tl.exp2(best - new_best)
        w = tl.exp2(log_sum - new_best[None, :])
        weight = weight * shrink + tl.sum(w, axis=0)
        acc = acc * shrink[:, None] + tl.sum(out * w[:, :, None], axis=0)
        best = new_best
    return acc / tl.where(g < GROUP, weight, 1.0)[:, None]
