"""Routing kernels against plain torch."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.moe.plans import NORMED_TOKENS, choose_router
from tandem.engine_core.kernels.moe.route import norm_and_route, normed_router, route, router_partials
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.reference.layer import add_rms_norm
from tandem.engine_core.kernels.tiles.plan_types import RouterPlan

METHODS = list(Routing)


def run_route(
    logits: Tensor,
    top_k: int,
    routing: Routing,
    rows: Tensor | None = None,
    uniform: int = 0,
    seed: int = 0,
    shared: bool = False,
) -> Routed:
    experts = logits.shape[1]
    counts = torch.zeros(experts, dtype=torch.int32, device=logits.device)
    switch = torch.tensor([uniform], dtype=torch.int32, device=logits.device)
    return route(logits[None].contiguous(), counts, top_k, routing, switch, rows, seed, shared=shared)


def check_sorted(routed: Routed, experts: int) -> None:
    """Each expert's list holds its pairs, in any order."""
    expected = moe.sort_pairs(routed, experts)
    assert routed.counts is not None and routed.pairs is not None
    assert expected.counts is not None and expected.pairs is not None
    assert torch.equal(routed.counts, expected.counts)
    for expert, count in enumerate(routed.counts.tolist()):
        assert torch.equal(routed.pairs[expert, :count].sort().values, expected.pairs[expert, :count])


@pytest.mark.parametrize("routing", METHODS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 6, 3), (3, 20, 20), (300, 9, 1)])
def test_route_equals_the_oracle(tokens: int, experts: int, top_k: int, routing: Routing, device: str) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts, device=device)
    routed, expected = run_route(logits, top_k, routing), moe.route(logits, top_k, routing)
    assert torch.equal(routed.ids, expected.ids)
    torch.testing.assert_close(routed.weights, expected.weights)
    check_sorted(routed, experts)


@pytest.mark.parametrize("routing", METHODS)
def test_ties_go_to_the_lowest_expert(routing: Routing, device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0, -1.0], [5.0] * 5], device=device)
    routed = run_route(logits, 3, routing)
    assert routed.ids.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert torch.equal(routed.ids, moe.route(logits, 3, routing).ids)


def test_renormalized_weights_sum_to_one_and_others_are_part_of_the_softmax(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 8, device=device)
    torch.testing.assert_close(run_route(logits, 3, Routing.TOP_K_SOFTMAX).weights, logits.topk(3).values.softmax(-1))
    torch.testing.assert_close(run_route(logits, 3, Routing.SOFTMAX).weights, logits.softmax(-1).topk(3).values)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("routing", METHODS)
def test_nan_and_infinite_logits_choose_distinct_valid_experts(routing: Routing, device: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 4, [nan, 1.0, nan, 2.0], [-inf] * 4, [inf, nan, -inf, 0.0]], device=device)
    routed = run_route(logits, 3, routing)
    assert torch.equal(routed.ids, moe.route(logits, 3, routing).ids)
    for row in routed.ids.tolist():
        assert len(set(row)) == 3 and set(row) <= set(range(4))
    check_sorted(routed, 4)


def test_padding_rows_are_not_routed(device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 8, device=device)
    rows = torch.tensor([3, 0, 1, 0, 0, 2], dtype=torch.int32, device=device)
    routed = run_route(logits, 2, Routing.TOP_K_SOFTMAX, rows)
    assert routed.ids[rows == 0].eq(-1).all() and routed.weights[rows == 0].eq(0).all()
    alone = run_route(logits, 2, Routing.TOP_K_SOFTMAX)
    assert torch.equal(routed.ids[rows != 0], alone.ids[rows != 0])
    assert routed.counts is not None and int(routed.counts.sum()) == 6
    check_sorted(routed, 8)


def test_uniform_routing_includes_padding_and_spreads_over_all_experts(device: str) -> None:
    logits = torch.zeros(64, 16, device=device)
    rows = torch.zeros(64, dtype=torch.int32, device=device)
    routed = run_route(logits, 4, Routing.TOP_K_SOFTMAX, rows, uniform=1, seed=5)
    expected = moe.route(moe.uniform_logits(64, 16, 5, logits.device), 4, Routing.TOP_K_SOFTMAX)
    assert torch.equal(routed.ids, expected.ids)
    assert routed.counts is not None
    assert int(routed.counts.sum()) == 256 and 4 < int(routed.counts.min()) <= int(routed.counts.max()) < 32
    other = run_route(logits, 4, Routing.TOP_K_SOFTMAX, rows, uniform=1, seed=6)
    assert not torch.equal(other.ids, routed.ids), "layers differ"


@pytest.mark.parametrize("uniform", [0, 1])
@pytest.mark.parametrize("routing", METHODS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 16, 3), (3, 4, 4), (300, 1, 1)])
def test_a_shared_expert_is_used_by_all_tokens(
    tokens: int, experts: int, top_k: int, routing: Routing, uniform: int, device: str
) -> None:
    """Its logit is the largest one, and must not count in the softmax of the others."""
    torch.manual_seed(tokens)
    logits, gate = torch.randn(tokens, experts, device=device), torch.randn(tokens, device=device) + 4
    rows = torch.arange(1, tokens + 1, dtype=torch.int32, device=device) % 4
    routed = run_route(torch.cat((logits, gate[:, None]), 1), top_k, routing, rows, uniform, 3, shared=True)
    others, used = (moe.uniform_logits(tokens, experts, 3, logits.device), None) if uniform else (logits, rows)
    expected = moe.route(others, top_k, routing, used, gate)
    assert torch.equal(routed.ids, expected.ids) and routed.ids.shape == (tokens, top_k + 1)
    torch.testing.assert_close(routed.weights, expected.weights)
    shares = gate.sigmoid() if used is None else torch.where(rows != 0, gate.sigmoid(), 0.0)
    torch.testing.assert_close(routed.weights[:, top_k], shares)
    assert torch.equal(routed.ids[:, top_k] >= 0, torch.ones_like(rows).bool() if used is None else rows != 0)
    counts, pairs = routed.sorted_pairs()
    assert len(counts) == experts + 1 and int(counts[experts]) == tokens
    last = torch.arange(tokens, device=device) * (top_k + 1) + top_k
    assert torch.equal(pairs[experts], last.int()), "all tokens in order, also padding"
    check_sorted(Routed(routed.ids, routed.weights, counts[:experts], pairs[:experts]), experts)


def test_the_parts_of_a_gates_logit_are_added(device: str) -> None:
    torch.manual_seed(8)
    parts = torch.randn(3, 7, 11, device=device)
    zeros = torch.zeros(11, dtype=torch.int32, device=device)
    switch = torch.zeros(1, dtype=torch.int32, device=device)
    routed = route(parts, zeros, 2, Routing.SOFTMAX, switch, sort=False, shared=True)
    total = parts.sum(0)
    expected = moe.route(total[:, :10], 2, Routing.SOFTMAX, gate=total[:, 10])
    assert torch.equal(routed.ids, expected.ids) and routed.pairs is None
    torch.testing.assert_close(routed.weights, expected.weights)


@pytest.mark.parametrize("uniform", [0, 1])
@pytest.mark.parametrize("tokens", [2, NORMED_TOKENS + 1])
def test_the_last_row_of_a_router_is_the_gate_of_the_shared_expert(tokens: int, uniform: int, device: str) -> None:
    torch.manual_seed(7)
    x, residual = torch.randn(tokens, 64, device=device), torch.randn(tokens, 64, device=device)
    norm, weight = torch.rand(64, device=device) + 0.5, torch.randn(9, 64, device=device) / 8
    switch = torch.full((1,), uniform, dtype=torch.int32, device=device)
    rows = torch.arange(1, tokens + 1, dtype=torch.int32, device=device) % 4
    given = (x, residual, norm, 1e-5, weight, 3, Routing.TOP_K_SOFTMAX, switch, rows, 5, None, True, True)
    normed, _, routed, _ = norm_and_route(*given)
    expected_norm, _, expected, _ = moe.norm_and_route(*given)
    torch.testing.assert_close(normed, expected_norm)
    assert torch.equal(routed.ids, expected.ids)
    torch.testing.assert_close(routed.weights, expected.weights, atol=1e-5, rtol=1e-5)
    shares = (normed @ weight[8]).sigmoid()
    routing = torch.ones_like(rows).bool() if uniform else rows != 0
    torch.testing.assert_close(expected.weights[:, 3], torch.where(routing, shares, 0.0))


@pytest.mark.parametrize(
    "plan", [RouterPlan(16, 16, 16, 1, 2, 4), RouterPlan(16, 16, 16, 3, 2, 4), RouterPlan(32, 16, 32, 2, 2, 4)]
)
def test_partial_logits_add_up_to_the_matmul(plan: RouterPlan, device: str) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(21, 88, device=device), torch.randn(19, 88, device=device)
    partials, counts = router_partials(x, weight, plan)
    assert partials.shape == (plan.split, 21, 19) and not counts.any()
    torch.testing.assert_close(partials.sum(0), moe.router_logits(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [2, 21])
def test_a_router_in_float32_is_not_rounded_to_the_dtype_of_its_inputs(tokens: int, device: str) -> None:
    """The weights differ by less than bfloat16 resolves."""
    torch.manual_seed(5)
    x, residual, norm = (torch.randn(shape, device=device).bfloat16() for shape in ((tokens, 64), (tokens, 64), (64,)))
    weight = torch.ones(6, 64, device=device) + torch.randn(6, 64, device=device) / 2**12
    normed, _ = add_rms_norm(x, residual, norm, 1e-5)
    expected = moe.router_logits(normed, weight)
    assert not torch.allclose(moe.router_logits(normed, weight.bfloat16()), expected, atol=1e-3)
    partials, _ = router_partials(normed, weight, RouterPlan(16, 16, 16, 2, 2, 4))
    torch.testing.assert_close(partials.sum(0), expected, atol=1e-4, rtol=1e-4)
    # The interpreter rounds a norm in bfloat16 differently.
    own, _, logits, *_ = normed_router(x, residual, norm, 1e-5, weight)
    torch.testing.assert_close(logits[0], moe.router_logits(own, weight), atol=1e-4, rtol=1e-4)


def test_route_adds_the_parts(device: str) -> None:
    torch.manual_seed(3)
    parts = torch.randn(3, 7, 10, device=device)
    zeros = torch.zeros(10, dtype=torch.int32, device=device)
    routed = route(parts, zeros, 2, Routing.SOFTMAX, torch.zeros(1, dtype=torch.int32, device=device), sort=False)
    expected = moe.route(parts.sum(0), 2, Routing.SOFTMAX)
    assert torch.equal(routed.ids, expected.ids) and routed.pairs is None
    torch.testing.assert_close(routed.weights, expected.weights)


@pytest.mark.parametrize("tokens", [1, 3, 60])
def test_normed_router_equals_norm_and_matmul(tokens: int, device: str) -> None:
    torch.manual_seed(4)
    x, residual = torch.randn(tokens, 40, device=device), torch.randn(tokens, 40, device=device)
    norm, weight = torch.randn(40, device=device), torch.randn(10, 40, device=device)
    normed, total, logits, counts, _ = normed_router(x, residual, norm, 1e-5, weight)
    expected, stream = add_rms_norm(x, residual, norm, 1e-5)
    assert torch.equal(total, stream) and not counts.any()
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(logits[0], moe.router_logits(expected, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("tokens", "inputs", "experts"), [(6, 384, 10), (6, 256, 3), (NORMED_TOKENS + 1, 384, 10)])
def test_the_norm_is_quantized_as_well(tokens: int, inputs: int, experts: int, group: int | None, device: str) -> None:
    """By the router's kernel for a few tokens, one of whose programs may be its only one, and else by the norm's."""
    torch.manual_seed(6)
    x, residual = torch.randn(tokens, inputs, device=device), torch.randn(tokens, inputs, device=device)
    norm, weight = torch.rand(inputs, device=device) + 0.5, torch.randn(experts, inputs, device=device)
    to, switch = ActivationFormat(torch.float8_e4m3fn, group), torch.zeros(1, dtype=torch.int32, device=device)
    given = (x, residual, norm, 1e-5, weight, 2, Routing.SOFTMAX, switch, None, 0, to)
    normed, total, routed, rows = norm_and_route(*given)
    expected, stream, other, expected_rows = moe.norm_and_route(*given)
    assert rows is not None and expected_rows is not None
    torch.testing.assert_close(normed, expected)
    assert torch.equal(total, stream) and torch.equal(routed.ids, other.ids)
    torch.testing.assert_close(rows.scales[:tokens], expected_rows.scales[:tokens])
    torch.testing.assert_close(rows.dequantize(), expected_rows.dequantize(), atol=0.02, rtol=0.1)
    assert norm_and_route(*given[:-1])[3] is None


@pytest.mark.parametrize("tokens", [1, 64, 65, 513])
@pytest.mark.parametrize("bits", [16, 32])
def test_planned_routers_cover_all_inputs(bits: int, tokens: int) -> None:
    for inputs in (64, 192, 2048, 2880, 4096):
        plan = choose_router(tokens, inputs, bits)
        assert plan.split >= 1 and plan.block_k * plan.split <= max(plan.block_k, 2 * inputs)
