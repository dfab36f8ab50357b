"""Mass and number of the tokens that rank ahead of drawn ones.

Top-p keeps a token if the mass ahead of it is less than p, and top-k if fewer than k tokens are ahead of it. So a drawn
token is tested in one pass, without computing where truncation ends (see `rejection_resample`).

If truncation drops a token, it drops all that rank after it. So only candidates that rank ahead of all earlier ones
are processed, about two of four, and only in tiles whose best token ranks ahead of them.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.engine_core.kernels.dependent_launch import wait_for_previous
from tandem.engine_core.kernels.fast_math import fast_exp2, ge_float32
from tandem.engine_core.kernels.sampling.columns import NUM_FLOATS, TEMPERATURE
from tandem.engine_core.kernels.sampling.gumbel_draw import CANDIDATES
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch, num_warps_for
from tandem.engine_core.kernels.sampling.sort_key import ADJACENT, ID_BITS, rank_id, rank_value, value_of_bits
from tandem.engine_core.kernels.sampling.truncation import load_truncation
from tandem.engine_core.kernels.sampling.weights import load_adjusted, log2_slope, log_weights


@triton.jit
def _is_ahead(x, rank, start):
    """Return 1.0 for tokens of a tile ahead of a rank, and 0.0 for others.

    start: first id of the tile.
    """
    # On ties the lower id is ahead. Except for the tile of the token itself, that holds for all ids or none. Comparing
    # with the next larger float implements a strict comparison.
    value, token = rank_value(rank), rank_id(rank)
    above = value_of_bits((rank >> ID_BITS).to(tl.int32) + 1)
    if (token >= start) & (token < start + x.shape[0]):
        # An id per token would take a register each.
        groups = tl.arange(0, x.shape[0] // ADJACENT)[:, None]
        offsets = tl.arange(0, ADJACENT)[None, :]
        group, offset = (token - start) // ADJACENT, (token - start) % ADJACENT
        lower = (groups < group) | ((groups == group) & (offsets < offset))
        ahead = ge_float32(x, tl.where(tl.reshape(lower, [x.shape[0]]), value, above))
    else:
        ahead = ge_float32(x, tl.where(token > start, value, above))
    return ahead


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _prefix_mass_kernel(
    logits_ptr,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    adjusted_ptr,
    tile_best_ptr,
    row_best_ptr,
    candidates_ptr,
    mass_mode_ptr,
    ahead_ptr,
    counts_ptr,
    logit_stride,
    adjusted_stride,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    tiles = tl.num_programs(0)
    wait_for_previous(PDL)
    # Two rounds of loads, each issued together: those by index, and those that depend on them.
    drawn_ptr = candidates_ptr + index * CANDIDATES
    mass_mode = tl.load(mass_mode_ptr + index)
    first = tl.load(drawn_ptr)
    best = tl.load(tile_best_ptr + index * tiles + tile)
    row = tl.load(rows_ptr + index).to(tl.int64)
    # A tile without a token ahead of the first candidate has none ahead of another candidate that matters. The row is
    # compared first so that its load is issued before this: padding is never processed.
    if (mass_mode == 0) | (best <= first) | (row == 0):
        return
    raw = logits_ptr + index.to(tl.int64) * logit_stride
    changed = adjusted_ptr + index.to(tl.int64) * adjusted_stride
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    top_k, _, _ = load_truncation(ints_ptr, floats_ptr, row, vocab)
    temperature = tl.load(floats_ptr + row * NUM_FLOATS + TEMPERATURE)
    top = rank_value(tl.load(row_best_ptr + index))
    x = load_adjusted(raw, changed, mass_mode == 2, ids, ids < vocab)
    weights = fast_exp2(log_weights(x, top, log2_slope(temperature)))
    offset = (index * tiles + tile) * CANDIDATES
    foremost = tl.full([], NOTHING, tl.int64)
    for number in tl.static_range(CANDIDATES):
        rank = tl.load(drawn_ptr + number)
        if (rank > foremost) & (rank < best):
            ahead = _is_ahead(x, rank, tile * BLOCK)
            tl.store(ahead_ptr + offset + number, tl.sum(ahead * weights, axis=0))
            if top_k > 0:
                tl.store(counts_ptr + offset + number, tl.sum(ahead, axis=0))
        foremost = tl.maximum(foremost, rank)


def prefix_mass(batch: SamplingBatch, tables: SamplingTables, scratch: SamplingScratch) -> None:
    """Compute the mass of the tokens ahead of the candidates of rows with a `mass_mode`.

    Writes their mass in each tile to `ahead`, and their number to `counts` for rows with top-k: for candidates that
    rank ahead of all earlier ones, in tiles whose best token ranks ahead of the candidate.
    """
    logits, adjusted = batch.logits, scratch.adjusted
    _prefix_mass_kernel[scratch.grid(len(logits))](
        logits,
        batch.rows,
        tables.ints,
        tables.floats,
        adjusted,
        scratch.tile_best,
        scratch.row_best,
        scratch.candidates,
        scratch.mass_mode,
        scratch.ahead,
        scratch.counts,
        logits.stride(0),
        adjusted.stride(0),
        scratch.vocab_size,
        BLOCK=scratch.tile,
        # Four programs per SM.
        maxnreg=128,
        **scratch.launch_options(num_warps_for(scratch.tile)),
    )
