"""Packed int4 values, eight in an int32.

Layouts of GPTQ, AWQ and compressed-tensors. Here and in compressed-tensors element 8 i + j of a dimension is bits 4 j
to 4 j + 3 of word i. GPTQ packs likewise along the inputs, AWQ along the outputs in an interleaved order.
"""

import torch
from torch import Tensor

PER_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Element stored in each nibble of a word by AutoAWQ, from the lowest."""


def unpack(words: Tensor) -> Tensor:
    """Unpack int4 values along the last dimension, [..., 8 W] uint8.

    words: [..., W] int32.
    """
    # Not `contiguous`, which keeps the strides of a dimension of one word.
    pairs = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def pack(levels: Tensor) -> Tensor:
    """Pack int4 values along the last dimension, [..., W] int32.

    levels: [..., 8 W] uint8, each at most 15.
    """
    low, high = levels[..., 0::2], levels[..., 1::2]
    return (low | (high << 4)).contiguous().view(torch.int32)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack words in AutoAWQ's order, [..., 8 W] uint8.

    words: [..., W] int32.
    """
    levels = unpack(words).view(*words.shape, PER_WORD)
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return levels[..., place].flatten(-2)
