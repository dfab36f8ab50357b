"""Memory layout of int4 weights for the GPU's kernels."""

import pytest
import torch

from tandem.engine_core.kernels.linear.int4_layout import from_kernel_layout, run_length, to_kernel_layout


@pytest.mark.parametrize(
    ("inputs", "group", "run"), [(256, 128, 4), (256, 32, 4), (160, 32, 1), (96, 96, 1), (256, 16, 0), (40, 40, 0)]
)
def test_each_value_is_in_the_word_and_nibble_of_its_thread(inputs: int, group: int, run: int) -> None:
    levels = torch.randint(0, 16, (3, inputs), dtype=torch.uint8)
    found = to_kernel_layout(levels, group)
    assert run_length(inputs, group) == run
    for place in range(inputs if run else 0):
        word, (e, d, c) = place // 8, (place >> 2 & 1, place >> 1 & 1, place & 1)
        block, (t, j) = word // (4 * run), divmod(word % (4 * run), run)
        source = block * 32 * run + 32 * j + 16 * d + 8 * c + 2 * t + e
        assert torch.equal(found[:, place], levels[:, source])
    if not run:
        assert torch.equal(found, levels)
    assert torch.equal(from_kernel_layout(found, group), levels)
