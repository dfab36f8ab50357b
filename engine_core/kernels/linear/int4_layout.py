"""Order of four-bit weights for GPU kernels.

Tensor cores take them in it as they are unpacked.
Of each block of 32 * run inputs, word t * run + j of a row has the eight inputs that thread t of four gives a tensor
core in its turns 2 j and 2 j + 1: level 4 e + 2 d + c is input 32 j + 16 d + 8 c + 2 t + e. `run` is 4, so that a
thread loads 16 bytes at a time, or 1 where the inputs do not divide into blocks of 128.
"""

from torch import Tensor

from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE

LONGEST_RUN = 4
PER_WORD = 8


def run_of(inputs: int, group: int) -> int:
    """Return the words of a run.

    It is 0 for inputs, or groups of them, that do not divide into blocks: those keep their usual order.
    """
    if inputs % INT4_STRIDE or group % INT4_STRIDE:
        return 0
    return LONGEST_RUN if inputs % (INT4_STRIDE * LONGEST_RUN) == 0 else 1


def group_and_run(words: Tensor, scales: Tensor, zeros: Tensor) -> tuple[int, int]:
    """Return the inputs of a group and the words of a run of weights.

    Their layout is checked. words: [outputs, inputs / 8]; scales, zeros: [outputs, groups].
    """
    assert words.is_contiguous() and len(words) == len(scales) == len(zeros)
    assert scales.t().is_contiguous() and zeros.t().is_contiguous(), "a group's scales and zero points lie together"
    inputs = words.shape[1] * PER_WORD
    group = inputs // scales.shape[1]
    return group, run_of(inputs, group)


def arranged(levels: Tensor, group: int) -> Tensor:
    """Bring levels into the order of the kernels.

    levels: [outputs, inputs]; group: inputs of a group.
    """
    run = run_of(levels.shape[1], group)
    # From parts j, d, c, t, e of an input's number to t, j, e, d, c.
    return _reordered(levels, (run, 2, 2, 4, 2), (0, 1, 5, 2, 6, 3, 4))


def restored(levels: Tensor, group: int) -> Tensor:
    """Undo `arranged`."""
    run = run_of(levels.shape[1], group)
    return _reordered(levels, (4, run, 2, 2, 2), (0, 1, 3, 5, 6, 2, 4))


def _reordered(levels: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Reorder the parts of each input's number.

    sizes: of the parts; if one is 0, nothing changes.
    """
    if 0 in sizes:
        return levels
    return levels.view(len(levels), -1, *sizes).permute(order).reshape(levels.shape)
