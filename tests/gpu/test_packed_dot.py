"""GEMVs with quantized weights, compiled: the tests of `kernels.linear.test_packed_dot` on a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine_core.kernels.linear.test_packed_dot import (  # noqa: F401
    test_an_input_that_dwarfs_the_others_costs_rows_that_it_cancels_in_nothing,
    test_sums_lose_little_compared_with_the_rounding_of_a_result,
    test_the_largest_sums_do_not_leave_float16s_range,
    test_zeros_and_nan_are_preserved,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> str:
    return "cuda"
