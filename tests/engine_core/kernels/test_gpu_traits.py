"""Maximum pipeline depth for the shared memory of a GPU."""

import pytest

from tandem.engine_core.kernels.gpu_traits import BARRIER_BYTES, GpuTraits
from tests.fakes.gpus import A100, B200, H200, KIB, L4, RTX_3090, RTX_5090


@pytest.mark.parametrize("gpu", [A100, RTX_3090, H200, B200, RTX_5090], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("warpgroup", [False, True])
@pytest.mark.parametrize(("stage", "other"), [(8 * KIB, 0), (32 * KIB, 20 * KIB), (33 * KIB + 16, 1)])
def test_one_more_stage_than_the_deepest_would_not_fit(gpu: GpuTraits, warpgroup: bool, stage: int, other: int) -> None:
    """Operands that go through registers leave the stage in use without a buffer."""
    reads_shared = warpgroup and gpu.capability[0] in (9, 10)
    stages = gpu.max_stages(stage, other, warpgroup=warpgroup)
    buffers = stages if reads_shared else stages - 1
    assert buffers * stage + other + BARRIER_BYTES <= gpu.shared_memory < (buffers + 1) * stage + other + BARRIER_BYTES


def test_a_stage_that_does_not_fit_is_still_one() -> None:
    """The compiler then reports what does not fit."""
    assert H200.max_stages(1000 * KIB, warpgroup=True) == 1
    assert H200.max_stages(8 * KIB, 1000 * KIB, warpgroup=False) == 1


def test_kernels_are_chained_from_hopper_on() -> None:
    assert [gpu.pdl for gpu in (A100, RTX_3090, L4, H200, B200, RTX_5090)] == [False] * 3 + [True] * 3
