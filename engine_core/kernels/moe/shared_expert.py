"""The output of a mixture's shared expert, which the last kernel of the other experts adds, in Triton.

Oracle: `reference.moe.with_shared_expert`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.moe.routing import SharedOutput


@triton.jit
def gate_weight(x_ptr, gate_ptr, width, BLOCK: tl.constexpr):
    """Return sigmoid(gate(x)) of one token. x, gate: [width], BLOCK is not smaller."""
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return tl.sigmoid(tl.sum(x * gate, 0))


def shared_arguments(shared: SharedOutput | None, unused: Tensor, width: int) -> tuple[tuple[Tensor, ...], int]:
    """Return the pointers of x, gate and output for a kernel, and the size of its block of x, 0 without the expert.

    unused: passed for the three tensors then; width: of a row.
    """
    if shared is None:
        return (unused, unused, unused), 0
    x, gate, output = shared.x, shared.gate, shared.output
    assert x.is_contiguous() and output.is_contiguous() and x.shape[1] == output.shape[1] == gate.shape[1] == width
    return (x, gate, output), triton.next_power_of_2(width)
