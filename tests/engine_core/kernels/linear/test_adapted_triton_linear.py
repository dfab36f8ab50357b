"""A linear layer on a GPU with adapters: GEMVs that add the updates, and separate launches, against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet, torch_kernels, triton_kernels
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.group_tokens import group_tokens
from tandem.engine_core.kernels.reference import lora as reference
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation
from tandem.engine_core.layers import triton_linear
from tandem.engine_core.layers.lora_linear import LoraLinear
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.triton_linear import SplitKWorkspace, TritonLinear
from tests.fakes.gpus import A100

INPUTS, SLOTS, RANK = 256, 3, 8


def layer_of(parts: dict[str, int], kernels: KernelSet, device: str) -> LoraLinear:
    torch.manual_seed(0)
    outputs = sum(parts.values())
    weight = (torch.randn(outputs, INPUTS, device=device) * INPUTS**-0.5).half()
    workspace = SplitKWorkspace()
    workspace.grow(1 << 16, 64, torch.device(device))
    base = TritonLinear(weight, torch.randn(outputs, device=device).half(), kernels, workspace, A100)
    layer = LoraLinear(base, INPUTS, parts, SLOTS, RANK, torch.device(device), torch.float16, kernels)
    layer.a.copy_(torch.randn(layer.a.shape) * INPUTS**-0.5)
    layer.b.copy_(torch.randn(layer.b.shape))
    layer.ranks.copy_(torch.tensor([[0], [RANK], [3], [0]]).expand(-1, len(parts)))
    return layer


def expected_of(layer: LoraLinear, x: Tensor, slots: Tensor, activation: Activation | None) -> Tensor:
    base = layer.base
    assert isinstance(base, TritonLinear) and base.bias is not None
    y = functional.linear(x.float(), base.weight.float(), base.bias.float())
    reference.add_lora(y, x, AdapterTokens(slots), layer.a, layer.b, layer.ranks, layer.starts)
    return y if activation is None else gated_activation(y, activation)


@pytest.mark.parametrize(("rows", "fuses"), [(1, ["gemv", "normed_gemv"]), (40, [])])
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_updates_are_added_before_bias_and_activation(
    rows: int, fuses: list[str], activation: Activation | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GEMV keeps the plan of the step without adapters; other matmuls add no updates."""
    launched: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def launch(*given: Any, **also: Any) -> Any:
            launched.append(name)
            return real(*given, **also)

        return launch

    for name in ("gemv", "normed_gemv"):
        monkeypatch.setattr(triton_linear, name, noted(name, getattr(triton_linear, name)))
    kernels = triton_kernels(pdl=False)
    layer = layer_of({"gate": 64, "up": 64} if activation else {"q": 128, "k": 64}, kernels, device)
    slots = torch.tensor([1 + row % 3 if row % 5 else 2 for row in range(rows)], dtype=torch.int32, device=device)
    adapted = layer.adapted(group_tokens(slots, SLOTS))
    x, residual = torch.randn(2, rows, INPUTS, device=device).half().unbind(0)
    norm = RMSNorm((torch.rand(INPUTS, device=device) + 0.5).half(), 1e-6, torch_kernels())
    y = adapted.apply(x) if activation is None else adapted.apply_gated(x, activation)
    torch.testing.assert_close(y.float(), expected_of(layer, x, slots, activation), atol=2e-2, rtol=1e-2)
    normed, total = add_rms_norm(x, residual, norm.weight, norm.eps)
    y, stream = adapted.apply_normed(x, residual, norm, activation)
    torch.testing.assert_close(y.float(), expected_of(layer, normed, slots, activation), atol=2e-2, rtol=1e-2)
    assert torch.equal(stream, total)
    assert sorted(launched) == fuses
