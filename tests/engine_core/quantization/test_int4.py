"""Packing orders against unpackers that process one word at a time."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine_core.quantization.int4 import pack, unpack, unpack_awq
from tests.support.quantized_checkpoint import AWQ_ORDER

WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=12).map(
    lambda words: torch.tensor(words, dtype=torch.int32)
)


def by_word(words: Tensor, order: tuple[int, ...]) -> list[int]:
    found = []
    for word in words.numpy().view(np.uint32):
        eight = [0] * 8
        for nibble in range(8):
            eight[order[nibble]] = (int(word) >> (4 * nibble)) % 16
        found += eight
    return found


@given(WORDS)
def test_unpack_starts_with_the_lowest_nibble_of_each_word(words: Tensor) -> None:
    assert unpack(words).tolist() == by_word(words, tuple(range(8)))


def test_a_column_of_words_is_unpacked() -> None:
    """As zero points of eight outputs, one word for each group."""
    words = torch.tensor([[5, -7]], dtype=torch.int32)
    assert unpack(words.t()).tolist() == [by_word(word, tuple(range(8))) for word in words[0].view(2, 1)]


@given(WORDS)
def test_awq_words_are_in_its_order(words: Tensor) -> None:
    assert unpack_awq(words).tolist() == by_word(words, AWQ_ORDER)


@given(WORDS)
def test_packing_undoes_unpacking(words: Tensor) -> None:
    assert torch.equal(pack(unpack(words)), words)
    assert torch.equal(pack(unpack(words.expand(3, -1)).t().contiguous().t()), words.expand(3, -1))
