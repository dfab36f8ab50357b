"""Split-KV: divide a row's blocks among programs and combine the partial results.

All attention kernels use the division, `paged_decode` the combination.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl


@triton.jit
def split_blocks(length, lowest, split, splits, least_blocks, BLOCK: tl.constexpr):
    """Return a program's range of blocks and the number of active splits.

    Blocks of `BLOCK` positions from the one with `lowest` to the one with `length - 1` are divided evenly among
    `splits` programs, with at least `least_blocks` each, so the last programs may be inactive. The range is the first
    block and the one after the last. split: index of the program.
    """
    skipped = lowest // BLOCK
    blocks = tl.cdiv(length, BLOCK) - skipped
    share = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
    first = split * share
    last = tl.minimum(first + share, blocks)
    return first + skipped, last + skipped, tl.cdiv(blocks, share)


@triton.jit
def _load_partials(
    partial_ptr,
    log_sums_ptr,
    start,
    used,
    splits,
    beyond,
    heads,
    EXTRA: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load the log sums, [CHUNK, ROWS], and outputs, [CHUNK, ROWS, WIDE], of the splits from `start` on.

    Those of splits from `used` on are -inf and 0. Other arguments as in `combine_splits`.
    """
    g = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    s = start + tl.arange(0, CHUNK)
    mask = (s < used)[:, None] & (g < heads)[None, :]
    index = s
    if EXTRA:
        index = tl.where(s < splits, s, s + beyond)
    offs = index[:, None] * GROUP + g[None, :]
    # Bypass L1, which may hold stale data of an earlier launch.
    log_sum = tl.load(log_sums_ptr + offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
    out = tl.load(
        partial_ptr + offs[:, :, None] * D + d[None, None, :],
        mask=mask[:, :, None] if WIDE == D else mask[:, :, None] & (d < D)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return log_sum, out


@triton.jit
def combine_splits(
    partial_ptr,
    log_sums_ptr,
    used,
    splits,
    beyond,
    heads,
    EXTRA: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Combine the partial outputs of splits, weighted by their softmax sums.

    used: number of splits; beyond: offset from the end of the outputs of a row's own `splits` to those of its extra
    splits; heads: number of heads that have outputs, at most GROUP; CHUNK: splits that are combined at a time. Returns
    [ROWS, WIDE] float32.
    """
    AHEAD: tl.constexpr = CHUNK == 1
    g = tl.arange(0, ROWS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    if AHEAD:
        log_sum, out = _load_partials(
            *(partial_ptr, log_sums_ptr, 0, used, splits, beyond, heads, EXTRA, GROUP, ROWS, D, WIDE, CHUNK)
        )
    for start in range(0, used, CHUNK):
        if AHEAD:
            # Many small steps would each wait for their loads.
            next_log_sum, next_out = _load_partials(
                *(partial_ptr, log_sums_ptr, start + 1, used, splits, beyond, heads, EXTRA, GROUP, ROWS, D, WIDE, CHUNK)
            )
        else:
            log_sum, out = _load_partials(
                *(partial_ptr, log_sums_ptr, start, used, splits, beyond, heads, EXTRA, GROUP, ROWS, D, WIDE, CHUNK)
            )
        largest = tl.reshape(log_sum, [ROWS]) if AHEAD else tl.max(log_sum, axis=0)
        # Unused heads of the tile have zero weight; a finite minimum avoids NaN.
        new_best = tl.maximum(tl.maximum(best, largest), -1e30)
        shrink = tl.exp2(best - new_best)
        w = tl.exp2(log_sum - new_best[None, :])
        weight = weight * shrink + tl.sum(w, axis=0)
        acc = acc * shrink[:, None] + tl.sum(out * w[:, :, None], axis=0)
        best = new_best
        if AHEAD:
            log_sum, out = next_log_sum, next_out
    return acc / tl.where(g < heads, weight, 1.0)[:, None]
