"""Division of the blocks of a row's positions among programs.

The attention kernels share it.
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
