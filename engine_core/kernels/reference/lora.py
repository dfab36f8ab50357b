"""Oracle of the low-rank updates of adapters: LoRA (Hu et al., 2021)."""

from itertools import pairwise

from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.lora.adapter_tokens import BASE_SLOT, AdapterTokens

_MIN_ROWS = 4
"""Minimum number of rows that a CPU multiplies, see `layers.torch_linear.CpuLinear`."""


def group_tokens(slots: Tensor, max_slots: int) -> AdapterTokens:  # noqa: ARG001
    """Return the tokens of a step by adapter.

    slots: [T] int32, as in `AdapterTokens`; max_slots: the largest.
    """
    return AdapterTokens(slots)


def add_lora(
    y: Tensor, x: Tensor, tokens: AdapterTokens, a: Tensor, b: Tensor, ranks: Tensor, starts: tuple[int, ...]
) -> Tensor:
    """Add x A^T B of each token's adapter to the matmul y, in place; return y.

    y: [T, outputs]; x: [T, inputs]; a: [S, P, R, inputs], b: [S, R, outputs], for slots 1 to S and the P parts of a
    fused projection, scaled; ranks: [S + 1, P] int32, rank of each slot and part, 0 if the adapter does not change the
    part; starts: P + 1 ascending indices, the outputs of part p are starts[p] to starts[p + 1] - 1. Rows of a and b
    from the rank on are not read. x A^T is rounded to the dtype of x.
    """
    for slot in tokens.slots.unique().tolist():
        if slot == BASE_SLOT:
            continue
        index = (tokens.slots == slot).nonzero()[:, 0]
        own = x[index].float()
        for part, ((start, end), rank) in enumerate(zip(pairwise(starts), ranks[slot].tolist(), strict=True)):
            if rank:
                shrunk = _matmul(own, a[slot - 1, part, :rank].float()).to(x.dtype).float()
                update = _matmul(shrunk, b[slot - 1, :rank, start:end].float().t())
                y[index, start:end] = (y[index, start:end].float() + update).to(y.dtype)
    return y


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T; the rounding of a row hardly depends on the number of rows."""
    rows = len(x)
    if rows < _MIN_ROWS:
        x = functional.pad(x, (0, 0, 0, _MIN_ROWS - rows))
    return functional.linear(x, weight)[:rows]
