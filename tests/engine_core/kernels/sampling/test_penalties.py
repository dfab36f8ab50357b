"""Penalties of long histories in Triton equal the oracle's, however many programs share a row."""

import pytest
import torch

from tandem.engine_core.kernels.sampling.penalties import MARK_BLOCK, history_parts
from tests.support.sampling_case import PRESENCE, PROMPT_LEN, REPETITION, ask_everything, check_full, make_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"tile": 128, "segment": 32, "group": 8, "capacity": 32}


@pytest.mark.parametrize(
    ("rows", "max_len", "parts"),
    [
        (1, 40, 8),
        (1, 8192, 8),
        (1, 16_384, 16),
        (1, 20_480, 16),
        (1, 131_072, 128),
        (8, 131_072, 128),
        (64, 131_072, 32),
        (128, 131_072, 16),
        (256, 131_072, 8),
    ],
)
def test_few_rows_of_long_histories_take_more_programs(rows: int, max_len: int, parts: int) -> None:
    assert history_parts(rows, max_len) == parts


def test_penalties_of_a_history_of_many_blocks_equal_the_oracle(device: str) -> None:
    """Two rows with more blocks than programs, one that ends within a block and one that does at its end."""
    case = make_case(3, 150, seed=6, max_len=18 * MARK_BLOCK)
    assert history_parts(len(case.rows), case.tokens.shape[1]) == 16
    ask_everything(case)
    case.floats[:, REPETITION], case.floats[:, PRESENCE] = 1.2, 0.4
    # Some tokens are only in the prompt, some only in the output, some in both, and some in neither.
    case.tokens[:] %= 100
    case.positions[:] = torch.tensor([17 * MARK_BLOCK + 5, 17 * MARK_BLOCK - 1, 3])
    for row, prompt in zip(case.rows.tolist(), (17 * MARK_BLOCK, 900, 2), strict=True):
        case.ints[row, PROMPT_LEN] = prompt
        case.tokens[row, :prompt] %= 80
        case.tokens[row, prompt:] += 40
    check_full(case.to(device), **SIZES)
