"""A plan's bound on the registers of a thread reaches the compiler."""

import pytest
import torch

from tandem.engine_core.kernels.linear import gemv, pieced_gemv, word_gemv
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tests.fakes.launched_kernel import LaunchedKernel


@pytest.mark.parametrize("registers", [None, 128])
def test_products_of_one_row_are_launched_with_their_bound(
    registers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = LaunchedKernel()
    for module, name in ((gemv, "gemv"), (word_gemv, "word_gemv"), (pieced_gemv, "pieced_gemv")):
        monkeypatch.setattr(module, f"{name}_kernel", kernel)
    x, plan = torch.zeros(1, 256), GemvPlan(16, 128, 1, 1, registers)
    words, scales = torch.zeros(16, 32, dtype=torch.int32), torch.zeros(2, 16)
    launched = []
    for launch in (
        lambda: gemv.gemv(x, torch.zeros(16, 256), None, plan),
        lambda: word_gemv.word_gemv(x, words, scales.t(), scales.to(torch.uint8).t(), None, plan),
        lambda: pieced_gemv.pieced_gemv(x, None, None, x[0], 1e-5, torch.zeros(16, 256), None, plan),
    ):
        launch()
        launched.append((kernel.options["maxnreg"], kernel.options["num_warps"]))
    assert launched == [(registers, 1)] * 3
