"""GEMVs that add the updates of adapters themselves: the kernels against their oracles."""

from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
from tandem.engine_core.kernels.linear.shrink_rows import shrink_rows
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.reference import layer
from tandem.engine_core.kernels.reference import lora as reference
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan

SLOTS, MAX_RANK = 4, 24


def adapters(parts: tuple[int, ...], inputs: int, device: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """A, B and ranks of all slots, and the first outputs of the parts. Memory behind a rank is NaN."""
    random, starts = Random(1), [0]
    for part in parts:
        starts.append(starts[-1] + part)
    a = torch.full((SLOTS, len(parts), MAX_RANK, inputs), torch.nan, device=device)
    b = torch.full((SLOTS, MAX_RANK, starts[-1]), torch.nan, device=device)
    ranks = torch.zeros(SLOTS + 1, len(parts), dtype=torch.int32)
    for slot in range(1, SLOTS + 1):
        for part in range(len(parts)):
            rank = MAX_RANK if slot == 1 else random.choice((0, 1, 8, 16, 17))
            ranks[slot, part] = rank
            a[slot - 1, part, :rank] = torch.randn(rank, inputs, device=device) / inputs**0.5
            b[slot - 1, :rank, starts[part] : starts[part + 1]] = torch.randn(rank, parts[part], device=device)
    return a, b, ranks.to(device), tuple(starts)


def slots_of(tokens: int, device: str) -> Tensor:
    random = Random(0)
    return torch.tensor([1, *(random.randint(0, SLOTS) for _ in range(tokens - 1))], dtype=torch.int32, device=device)


def expected_of(x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, given, activation) -> Tensor:
    y = reference.add_lora(functional.linear(x, weight, bias), x, AdapterTokens(slots), *given)
    return y if activation is None else layer.gated_activation(y, activation)


@pytest.mark.parametrize(
    ("tokens", "parts", "inputs", "plan", "activation"),
    [
        (1, (44, 20, 20), 200, GemvPlan(4, 128), None),
        (3, (70,), 200, GemvPlan(2, 128), None),
        (1, (44, 20, 20), 120, GemvPlan(4, 128, 2), None),
        (4, (38, 38), 120, GemvPlan(4, 128, 2), Activation.SILU),
        (1, (38, 38), 120, GemvPlan(4, 128), Activation.SILU),
    ],
)
def test_gemv(tokens, parts, inputs, plan, activation, device) -> None:
    torch.manual_seed(0)
    a, b, ranks, starts = adapters(parts, inputs, device)
    x, weight = torch.randn(tokens, inputs, device=device), torch.randn(starts[-1], inputs, device=device)
    bias, slots = torch.randn(starts[-1], device=device), slots_of(tokens, device)
    update = shrink_rows(x, None, None, None, 0.0, LoraUpdates(AdapterTokens(slots), a, b, ranks, starts))
    found = gemv(x, weight, bias, plan, activation, update=update)
    expected = expected_of(x, weight, bias, slots, (a, b, ranks, starts), activation)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(("parts", "activation"), [((44, 20, 20), None), ((38, 38), Activation.SILU)])
def test_normed_gemv(tokens, mode, parts, activation, device) -> None:
    torch.manual_seed(0)
    inputs = 120
    a, b, ranks, starts = adapters(parts, inputs, device)
    x, weight = torch.randn(tokens, inputs, device=device), torch.randn(starts[-1], inputs, device=device)
    residual = torch.randn(tokens, inputs, device=device) if mode > 1 else None
    x_weight = torch.randn(inputs, device=device) if mode == 3 else None
    norm_weight, slots = torch.randn(inputs, device=device), slots_of(tokens, device)
    given = residual, x_weight, norm_weight, 1e-5
    update = shrink_rows(x, *given, LoraUpdates(AdapterTokens(slots), a, b, ranks, starts))
    found, stream = normed_gemv(x, *given, weight, None, GemvPlan(4, 128), activation, update=update)
    if mode == 1:
        normed, total = layer.rms_norm(x, norm_weight, 1e-5), x
    elif mode == 2:
        normed, total = layer.add_rms_norm(x, residual, norm_weight, 1e-5)
    else:
        normed, total = layer.norm_add_rms_norm(x, x_weight, residual, norm_weight, 1e-5)
    expected = expected_of(normed, weight, None, slots, (a, b, ranks, starts), activation)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(stream, total)
