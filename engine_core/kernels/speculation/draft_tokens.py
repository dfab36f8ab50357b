"""Drafts in the token table: the tokens that may follow a row's known ones.

The drafter writes them after a row's known tokens and fills up with -1, so that the history of every verified position
is contiguous. `accept` overwrites them with the accepted tokens.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.sampling.columns import NUM_INTS, TOTAL_LEN
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS

PROMPT_LEN = tl.constexpr(INT_COLUMNS.index("prompt_len"))
MAX_DRAFTS = tl.constexpr(INT_COLUMNS.index("max_drafts"))
PREDICTION_LEN = tl.constexpr(INT_COLUMNS.index("prediction_len"))
MAX_QUERIES = 8
"""Maximum number of tokens of a row. The kernels have room for as many, whatever their number: each number would be
compiled for itself, which takes a start longer than the kernels ever save."""


@triton.jit
def load_int(ints_ptr, row, COLUMN: tl.constexpr):
    """Return a row's entry of the integer table as int32."""
    return tl.load(ints_ptr + row * NUM_INTS + COLUMN).to(tl.int32)


@triton.jit
def load_drafts(tokens_ptr, ints_ptr, row, length, token_stride, max_len, i, queries):
    """Load the drafts of a row, and return them with their number and the row's maximum length.

    The number ends at the first missing draft, and excludes positions that are never computed: the last token of a row
    has no KV. i: indices from 0 to at least queries - 1; row: int64.
    """
    limit = load_int(ints_ptr, row, TOTAL_LEN)
    inside = (i < queries - 1) & (length + i < tl.minimum(limit - 1, max_len))
    drafts = tl.load(tokens_ptr + row * token_stride + length + i, mask=inside, other=-1)
    count = tl.min(tl.where(drafts >= 0, queries - 1, tl.minimum(i, queries - 1)), axis=0)
    return drafts, count, limit
