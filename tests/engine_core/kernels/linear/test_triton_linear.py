"""One row after one norm and after two, using the kernels of a GPU's plans, against plain torch in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation, norm_add_rms_norm, rms_norm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tandem.engine_core.kernels.tiles.table import MatmulKey, TileTable
from tandem.engine_core.layers import triton_linear
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.triton_linear import SplitKWorkspace, TritonLinear
from tests.fakes.gpus import A100

EPS, INPUTS = 1e-6, 2560
UNCHAINED = A100
"""A GPU without programmatic dependent launch, which Triton's interpreter lacks."""


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize("norms", [0, 1, 2])
def test_one_row_behind_its_norms_equals_separate_operations(
    norms: int, activation: Activation | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """norms: 0 of the first update, 1 of the stream, 2 of the update and then of the stream."""
    in_chunks: list[int] = []
    normed_gemv = triton_linear.normed_gemv

    def noted(*given: Any) -> Any:
        if given[7].block_k < INPUTS:
            in_chunks.append(norms)
        return normed_gemv(*given)

    monkeypatch.setattr(triton_linear, "normed_gemv", noted)
    torch.manual_seed(norms)
    x, residual = torch.randn(2, 1, INPUTS, device=device).unbind(0)
    update, stream = (RMSNorm(torch.rand(INPUTS, device=device) + 0.5, EPS, torch_kernels()) for _ in range(2))
    weight = torch.randn(24, INPUTS, device=device) * INPUTS**-0.5
    linear = TritonLinear(weight, None, torch_kernels(), SplitKWorkspace(), UNCHAINED)
    norm = SandwichNorm(update, stream) if norms == 2 else stream
    y, total = linear.apply_normed(x, residual if norms else None, norm, activation)
    if norms == 0:
        normed, expected_total = rms_norm(x, stream.weight, EPS), x
    elif norms == 1:
        normed, expected_total = add_rms_norm(x, residual, stream.weight, EPS)
    else:
        normed, expected_total = norm_add_rms_norm(x, update.weight, residual, stream.weight, EPS)
    expected = functional.linear(normed, weight)
    torch.testing.assert_close(y, expected if activation is None else gated_activation(expected, activation))
    torch.testing.assert_close(total, expected_total)
    assert in_chunks == [2] * (norms == 2)


def test_few_rows_of_16_bits_use_the_measured_gemvs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []

    def noted(name: str, real: Any) -> Any:
        def launch(x: Tensor, *given: Any, **also: Any) -> Any:
            launched.append((name, x.shape[0]))
            return real(x, *given, **also)

        return launch

    for name in ("gemv", "normed_gemv"):
        monkeypatch.setattr(triton_linear, name, noted(name, getattr(triton_linear, name)))
    plans = {MatmulKey(name, 16, 16, 128, 4): GemvPlan(4, 128, 1, 4) for name in ("product", "normed", "normed_gated")}
    gpu = replace(UNCHAINED, tiles=TileTable("few rows", plans))
    torch.manual_seed(1)
    norm = RMSNorm((torch.rand(128, device=device) + 0.5).half(), EPS, torch_kernels())
    weights = [(torch.randn(outputs, 128, device=device) * 0.1).half() for outputs in (16, 32)]
    one, two = (TritonLinear(weight, None, torch_kernels(), SplitKWorkspace(), gpu) for weight in weights)
    for rows in (2, 3, 4, 5):
        x, residual = torch.randn(2, rows, 128, device=device).half().unbind(0)
        normed, total = add_rms_norm(x, residual, norm.weight, EPS)
        expected = [functional.linear(normed.float(), weight.float()) for weight in weights]
        expected[1] = gated_activation(expected[1], Activation.SILU)
        for linear, activation, sums in ((one, None, expected[0]), (two, Activation.SILU, expected[1])):
            y, stream = linear.apply_normed(x, residual, norm, activation)
            torch.testing.assert_close(y.float(), sums, atol=5e-3, rtol=5e-3)
            assert torch.equal(stream, total)
        plain = functional.linear(x.float(), weights[0].float())
        torch.testing.assert_close(one.apply(x).float(), plain, atol=5e-3, rtol=5e-3)
    few = [("normed_gemv", rows) for rows in (2, 3, 4) for _ in range(2)]
    assert sorted(launched) == sorted(few + [("gemv", rows) for rows in (2, 3, 4)])
