"""A linear layer on a GPU with adapters: GEMVs that add the updates, and separate launches, against plain torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

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
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.lora_linear import LoraLinear, LoraSlots
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.triton_linear import SplitKWorkspace, TritonLinear
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme
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


SCHEMES: dict[str, Scheme | None] = {
    "16 bits": None,
    "fp8 blocks": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "fp8 without quantized inputs": EightBitScheme("fp8", Activations.UNQUANTIZED),
    "int4": Int4Scheme("gptq", 64, False),
}


@contextmanager
def noted_launches() -> Iterator[list[str]]:
    """Collect the names of the interpreted kernels that are launched meanwhile."""
    from triton.runtime.interpreter import GridExecutor

    launched, call = list[str](), GridExecutor.__call__

    def noted(executor: Any, *given: Any, **also: Any) -> Any:
        launched.append(executor.fn.__name__)
        return call(executor, *given, **also)

    with patch.object(GridExecutor, "__call__", noted):
        yield launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("name", "rows"), [("16 bits", 1), *((name, 20) for name in SCHEMES)])
def test_the_update_of_a_projection_takes_at_most_two_launches(name: str, rows: int) -> None:
    """One if the GEMV adds it, else two, for any number of parts and adapters. The same inputs give the same bits."""
    scheme, device = SCHEMES[name], torch.device("cpu")
    context = triton_build_context(device, torch.float16, A100, scheme and Quantization(scheme))
    lora = LoraSlots(SLOTS, RANK, lambda slots, most: group_tokens(slots, most))
    base = context.linear("proj", 128, INPUTS, True)
    for slot in base.slots("", "proj"):
        value = torch.randint(1, 5, slot.target.shape) if "int" in str(slot.target.dtype) else torch.rand(1)
        slot.target.copy_(value.to(slot.target.dtype))
    layer = lora.wrap("proj", base, INPUTS, {"q": 64, "k": 32, "v": 32}, device, torch.float16, context.kernels)
    layer.a.copy_(torch.randn(layer.a.shape) * INPUTS**-0.5)
    layer.b.copy_(torch.randn(layer.b.shape))
    layer.ranks.copy_(torch.tensor([[0], [RANK], [3], [5]]).expand(-1, 3))
    slots = torch.tensor([1 + row % 3 for row in range(rows)], dtype=torch.int32)
    x, residual = torch.randn(2, rows, INPUTS).half().unbind(0)
    norm = RMSNorm(torch.ones(INPUTS).half(), 1e-6, context.kernels)
    adapted = layer.adapted(group_tokens(slots, SLOTS))
    calls: list[Callable[[], Tensor]] = [
        lambda: adapted.apply(x),
        lambda: adapted.apply_gated(x, Activation.SILU),
        lambda: adapted.apply_normed(x, residual, norm)[0],
        lambda: adapted.apply_normed(x, residual, norm, Activation.SILU)[0],
    ]
    for call in calls:
        with noted_launches() as launched:
            first = call()
        updates = [kernel for kernel in launched if kernel.startswith(("_shrink", "_expand"))]
        assert len(updates) == min(rows, 2), launched
        assert torch.equal(call(), first) and first.isfinite().all()
