"""Memory layout of int4 weights for GPU kernels.

It is the order in which unpacked values are passed to the tensor cores. In each block of 32 * run inputs, word t * run
+ j of a row has the eight inputs that thread t of four passes to a tensor core in its instructions 2 j and 2 j + 1:
value 4 e + 2 d + c is input 32 j + 16 d + 8 c + 2 t + e. `run` is 4, for 16-byte loads per thread, or 1 if blocks of
128 do not divide the inputs.
"""

from torch import Tensor

from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE

MAX_RUN = 4
PER_WORD = 8


def run_length(inputs: int, group: int) -> int:
    """Return the run length in words.

    0 if blocks do not divide the inputs or the group size: these keep the original order.
    """
    if inputs % INT4_STRIDE or group % INT4_STRIDE:
        return 0
    return MAX_RUN if inputs % (INT4_STRIDE * MAX_RUN) == 0 else 1


def group_and_run(words: Tensor, scales: Tensor, zeros: Tensor) -> tuple[int, int]:
    """Return a weight's group size and run length.

    Shapes and strides are checked. words: [outputs, inputs / 8]; scales, zeros: [outputs, groups].
    """
    assert words.is_contiguous() and len(words) == len(scales) == len(zeros)
    assert scales.t().is_contiguous() and zeros.t().is_contiguous(), "a group's scales and zero points lie together"
    inputs = words.shape[1] * PER_WORD
    group = inputs // scales.shape[1]
    return group, run_length(inputs, group)


def to_kernel_layout(levels: Tensor, group: int) -> Tensor:
    """Reorder int4 values to the kernels' layout.

    levels: [outputs, inputs]; group: group size.
    """
    run = run_length(levels.shape[1], group)
    # From bit fields j, d, c, t, e of an input index to t, j, e, d, c.
    return _reordered(levels, (run, 2, 2, 4, 2), (0, 1, 5, 2, 6, 3, 4))


def from_kernel_layout(levels: Tensor, group: int) -> Tensor:
    """Undo `to_kernel_layout`."""
    run = run_length(levels.shape[1], group)
    return _reordered(levels, (4, run, 2, 2, 2), (0, 1, 3, 5, 6, 2, 4))


def _reordered(levels: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Permute the bit fields of each input index.

    sizes: of the fields; if one is 0, nothing changes.
    """
    if 0 in sizes:
        return levels
    return levels.view(len(levels), -1, *sizes).permute(order).reshape(levels.shape)
