"""The last kernels of a mixture with its shared expert, against plain torch."""

import pytest
import torch

from tandem.engine_core.kernels.moe.expert_gemv import down_gemv
from tandem.engine_core.kernels.moe.grouped_gemm import combine
from tandem.engine_core.kernels.moe.routing import Routed, Routing, SharedOutput
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
EXPERTS, TOP_K = 5, 3


def routing(tokens: int, device: str) -> Routed:
    """Route some tokens; the last of several is padding."""
    rows = torch.ones(tokens, dtype=torch.int32, device=device)
    rows[1:][-1:] = 0
    return moe.route(torch.randn(tokens, EXPERTS, device=device), TOP_K, Routing.TOP_K_SOFTMAX, rows)


def shared_output(tokens: int, width: int, device: str) -> SharedOutput:
    x, output = (torch.randn(tokens, width, device=device) for _ in range(2))
    return SharedOutput(output, x, torch.randn(1, width, device=device) / width**0.5)


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 200), (6, 2048)])
def test_combine_adds_the_shared_expert(tokens: int, width: int, device: str) -> None:
    torch.manual_seed(width)
    routed, shared = routing(tokens, device), shared_output(tokens, width, device)
    pairs = torch.randn(tokens * TOP_K, width, device=device)
    expected = moe.with_shared_expert(combine(pairs, routed), shared)
    torch.testing.assert_close(combine(pairs, routed, shared=shared), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 200)])
def test_the_down_projection_of_a_few_tokens_adds_the_shared_expert(tokens: int, width: int, device: str) -> None:
    torch.manual_seed(width)
    routed, shared, plan = routing(tokens, device), shared_output(tokens, width, device), GemvPlan(4, 16)
    x, weight = torch.randn(tokens, TOP_K, 32, device=device), torch.randn(EXPERTS, width, 32, device=device)
    expected = moe.with_shared_expert(down_gemv(x, weight, None, routed, plan), shared)
    found = down_gemv(x, weight, None, routed, plan, shared=shared)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_a_closed_gate_leaves_the_other_experts(device: str) -> None:
    routed, pairs = routing(2, device), torch.randn(2 * TOP_K, 32, device=device)
    ones = torch.ones(2, 32, device=device)
    closed = SharedOutput(ones, ones, torch.full((1, 32), -9.0, device=device))
    assert torch.equal(combine(pairs, routed, shared=closed), combine(pairs, routed))
