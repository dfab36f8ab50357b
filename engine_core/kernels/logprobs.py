"""Log-probabilities of a few tokens a row, in Triton: one pass over the logits, then a gather.

Each tile gives its largest logit and the sum of exp(logit - largest) (Milakov and Gimelshein, 2018); the gather adds
them up in a fixed order. Oracle: `torch.log_softmax` in float32. NaN counts as -inf, as in sampling.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.sample_greedy import check_logits, launch_options, load_logits, warps_for

BLOCK_SIZE = 4096


@triton.jit
def _mass_kernel(logits, tops, masses, logit_stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    index = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + index.to(tl.int64) * logit_stride, ids, ids < vocab)
    top = tl.max(x, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    place = index * tl.num_programs(0) + tile
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def _gather_kernel(
    logits,
    ids,
    tops,
    masses,
    result,
    logit_stride,
    id_stride,
    wanted,
    tiles,
    vocab,
    TILES_PAD: tl.constexpr,
    WANTED_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.arange(0, TILES_PAD)
    inside = places < tiles
    top = tl.load(tops + index * tiles + places, mask=inside, other=float("-inf"))
    mass = tl.load(masses + index * tiles + places, mask=inside, other=0.0)
    largest = tl.max(top, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = shift + tl.log(tl.sum(mass * tl.exp(top - shift), axis=0))
    columns = tl.arange(0, WANTED_PAD)
    token = tl.load(ids + index * id_stride + columns, mask=columns < wanted, other=-1)
    x = load_logits(logits + index * logit_stride, token, (token >= 0) & (token < vocab))
    value = tl.where(x == float("-inf"), x, x - normalizer)
    tl.store(result + index * wanted + columns, value, mask=columns < wanted)


def gather_logprobs(logits: Tensor, ids: Tensor, pdl: bool = False, block: int = BLOCK_SIZE) -> Tensor:
    """log_softmax(logits)[b, ids[b, j]], float32 [B, n]; -inf for an id that is not in the vocabulary.

    logits: [B, V] float32, bfloat16 or float16, rows contiguous; ids: [B, n] int32 or int64, rows contiguous.
    ValueError for logits of another kind. Captured in a graph, its result belongs to the graph.
    """
    check_logits(logits)
    (batch, vocab), wanted = logits.shape, ids.shape[1]
    tiles = triton.cdiv(vocab, block)
    tops = torch.empty(batch, tiles, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)
    result = torch.empty(batch, wanted, dtype=torch.float32, device=logits.device)
    if batch == 0 or wanted == 0:
        return result
    options = launch_options(pdl, warps_for(block))
    _mass_kernel[(tiles, batch)](logits, tops, masses, logits.stride(0), vocab, BLOCK=block, **options)
    _gather_kernel[(batch,)](
        logits,
        ids,
        tops,
        masses,
        result,
        logits.stride(0),
        ids.stride(0),
        wanted,
        tiles,
        vocab,
        TILES_PAD=triton.next_power_of_2(tiles),
        WANTED_PAD=triton.next_power_of_2(wanted),
        **options,
    )
    return result
