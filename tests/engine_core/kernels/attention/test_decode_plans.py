"""Who rotates the heads of new tokens in a decode step, by shape and number of rows."""

import pytest
import torch

from tandem.engine_core.kernels.attention.decode_plans import choose_plan, choose_rotating
from tests.fakes.gpus import A100, H200


@pytest.mark.parametrize(
    ("pairs", "early"), [(8, None), (63, None), (64, True), (511, True), (512, False), (1023, False), (1024, True)]
)
def test_attention_rotates_heads_of_64_where_rows_are_several(pairs: int, early: bool | None) -> None:
    found = choose_rotating(64, pairs, torch.bfloat16, H200)
    usual = choose_plan(64, pairs, torch.bfloat16, torch.bfloat16, H200)
    assert found == (None if early is None else usual._replace(early=early))


def test_others_are_rotated_by_a_kernel_before() -> None:
    for head_dim, dtype in ((128, torch.bfloat16), (64, torch.float32), (64, torch.float8_e4m3fn)):
        assert choose_rotating(head_dim, 256, dtype, H200) is None


def test_a_gpu_without_dependent_launch_loads_nothing_early() -> None:
    found = choose_rotating(64, 256, torch.bfloat16, A100)
    assert found is not None and not found.early
