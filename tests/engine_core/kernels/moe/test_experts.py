"""Kernels of experts against plain torch, in float32."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from tandem.engine_core.kernels.moe.grouped_gemm import combine, grouped_down, grouped_gate_up
from tandem.engine_core.kernels.moe.plans import max_blocks, tile_experts
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.quantize import quantize
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, GroupedPlan

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
FP8 = torch.float8_e4m3fn


class Experts:
    """Random experts. granularity: of FP8 scales; None: weights in float32."""

    def __init__(self, experts: int, hidden: int, width: int, granularity: str | None, device: str) -> None:
        torch.manual_seed(experts * hidden + width)
        self.gate_up = torch.randn(experts, 2 * width, hidden, device=device) / hidden**0.5
        self.down = torch.randn(experts, hidden, width, device=device) / width**0.5
        self.scales: list[Tensor | None] = [None, None]
        if granularity is None:
            return
        self.gate_up, self.down = (self.gate_up * 16).to(FP8), (self.down * 16).to(FP8)
        shapes = [(2 * experts, width, hidden), (experts, hidden, width)]
        for index, (parts, outputs, inputs) in enumerate(shapes):
            shape = (parts, outputs) if granularity == "output" else (parts, -(-outputs // 128), -(-inputs // 128))
            self.scales[index] = (torch.rand(shape, device=device) - 0.5) / 4

    def expected(self, x: Tensor, routed: Routed) -> Tensor:
        return moe.run_experts(x, self.gate_up, self.down, routed, Activation.SILU, *self.scales)


def route(tokens: int, experts: int, top_k: int, device: str, padding: bool = False) -> Routed:
    logits = torch.randn(tokens, experts, device=device)
    rows = torch.arange(tokens, device=device) % 3 if padding else None
    return moe.sort_pairs(moe.route(logits, top_k, Routing.TOP_K_SOFTMAX, rows), experts)


def spoil_padding(x: Tensor, routed: Routed) -> Tensor:
    """Return x with NaN in rows that are not routed."""
    return torch.where((routed.ids[:, :1] < 0), torch.nan, x)


GEMV_PLANS = [(GemvPlan(2, 64, 2), GemvPlan(4, 64)), (GemvPlan(4, 16), GemvPlan(8, 16))]


@pytest.mark.parametrize("granularity", [None, "output", "block"])
@pytest.mark.parametrize("plans", GEMV_PLANS)
@pytest.mark.parametrize(("hidden", "width"), [(48, 20), (64, 40)])
def test_gemv_equals_the_oracle(
    hidden: int, width: int, plans: tuple[GemvPlan, GemvPlan], granularity: str | None, device: str
) -> None:
    experts = Experts(5, hidden, width, granularity, device)
    routed = route(4, 5, 3, device, padding=True)
    x = torch.randn(4, hidden, device=device)
    gated = gate_up_gemv(x, experts.gate_up, experts.scales[0], routed, Activation.SILU, plans[0])
    gated[(routed.ids < 0)] = torch.nan
    y = down_gemv(gated, experts.down, experts.scales[1], routed, plans[1])
    torch.testing.assert_close(y, experts.expected(x, routed), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("granularity", [None, "output", "block"])
@pytest.mark.parametrize("top_k", [4, 5, 6, 9])
@pytest.mark.parametrize(("hidden", "width", "block"), [(48, 20, 16), (140, 272, 128), (64, 32, 32)])
def test_the_last_expert_of_five_or_nine_has_a_tile_of_its_own(
    hidden: int, width: int, block: int, top_k: int, granularity: str | None, device: str
) -> None:
    assert tile_experts(top_k) == {4: 4, 5: 4, 6: 8, 9: 8}[top_k]
    experts, routed = Experts(11, hidden, width, granularity, device), route(4, 11, top_k, device, padding=True)
    gated = torch.randn(4, top_k, width, device=device)
    gated[(routed.ids < 0)] = torch.nan
    found = down_gemv(gated, experts.down, experts.scales[1], routed, GemvPlan(4, block))
    expected = torch.zeros(4, hidden, device=device)
    for token, rank in (routed.ids >= 0).nonzero().tolist():
        expert, scales = int(routed.ids[token, rank]), experts.scales[1]
        weight = moe.dequantize_part(experts.down[expert], None if scales is None else scales[expert], torch.float32)
        expected[token] += routed.weights[token, rank] * (weight @ gated[token, rank])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def grouped(x: Tensor, experts: Experts, routed: Routed, plan: GroupedPlan) -> Tensor:
    gated = grouped_gate_up(x, experts.gate_up, experts.scales[0], routed, Activation.SILU, plan)
    return combine(grouped_down(gated, experts.down, experts.scales[1], routed, plan), routed)


@pytest.mark.parametrize("granularity", [None, "output", "block"])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(6, 48, 20), (40, 64, 40)])
def test_grouped_gemm_equals_the_oracle(
    tokens: int, hidden: int, width: int, block: int, granularity: str | None, device: str
) -> None:
    experts = Experts(7, hidden, width, granularity, device)
    routed = route(tokens, 7, 3, device, padding=True)
    x = torch.randn(tokens, hidden, device=device)
    y = grouped(spoil_padding(x, routed), experts, routed, GroupedPlan(block, 16, 16, 2, 4))
    torch.testing.assert_close(y, experts.expected(x, routed), atol=1e-4, rtol=1e-4)
    assert y[routed.ids[:, 0] < 0].eq(0).all()


def test_quantized_rows_and_weights_in_blocks_equal_dequantized_ones(device: str) -> None:
    experts = Experts(3, 256, 128, "block", device)
    routed = route(9, 3, 2, device, padding=True)
    x, to, plan = torch.randn(9, 256, device=device), ActivationFormat(FP8, 128), GroupedPlan(16, 128, 128, 2, 4)
    rows = quantize(x, to)
    gated = grouped_gate_up(rows, experts.gate_up, experts.scales[0], routed, Activation.SILU, plan)
    again = grouped_gate_up(rows, experts.gate_up, experts.scales[0], routed, Activation.SILU, plan, to)
    valid = routed.ids.flatten() >= 0
    gated[~valid] = 0  # Rows of padding are not written and may hold NaN.
    torch.testing.assert_close(again.dequantize()[valid], quantize(gated, to).dequantize()[valid], atol=0.02, rtol=0.1)
    first = grouped_gate_up(rows.dequantize(), dequantized(experts), None, routed, Activation.SILU, plan)
    torch.testing.assert_close(gated[valid], first[valid], atol=1e-3, rtol=1e-3)
    y = combine(grouped_down(again, experts.down, experts.scales[1], routed, plan), routed)
    torch.testing.assert_close(y, down(experts, again.dequantize(), routed), atol=1e-3, rtol=1e-3)


def dequantized(experts: Experts) -> Tensor:
    """Return the weights of gate and up in float32."""
    count, both, hidden = experts.gate_up.shape
    scales, halves = experts.scales[0], experts.gate_up.view(2 * count, both // 2, hidden)
    assert scales is not None
    parts = [moe.dequantize_part(half, own, torch.float32) for half, own in zip(halves, scales, strict=True)]
    return torch.stack(parts).view(count, both, hidden)


def down(experts: Experts, hidden: Tensor, routed: Routed) -> Tensor:
    """Return the weighted sums of down projections. hidden: [T * k, width]."""
    scales = experts.scales[1]
    assert scales is not None
    tokens, top_k = routed.ids.shape
    total = torch.zeros(tokens, experts.down.shape[1], device=hidden.device)
    for token, place in (routed.ids >= 0).nonzero().tolist():
        expert = int(routed.ids[token, place])
        weight = moe.dequantize_part(experts.down[expert], scales[expert], torch.float32)
        total[token] += routed.weights[token, place] * (weight @ hidden[token * top_k + place])
    return total


def test_quantized_rows_and_scales_of_outputs_equal_dequantized_ones(device: str) -> None:
    experts = Experts(3, 128, 128, "output", device)
    routed = route(5, 3, 2, device)
    x, to, plan = torch.randn(5, 128, device=device), ActivationFormat(FP8), GroupedPlan(16, 64, 128, 2, 4)
    rows = quantize(x, to)
    gated = grouped_gate_up(rows, experts.gate_up, experts.scales[0], routed, Activation.SILU, plan)
    first = grouped_gate_up(rows.dequantize(), dequantized(experts), None, routed, Activation.SILU, plan)
    torch.testing.assert_close(gated, first, atol=1e-3, rtol=1e-3)
    again = quantize(gated, to)
    y = combine(grouped_down(again, experts.down, experts.scales[1], routed, plan), routed)
    torch.testing.assert_close(y, down(experts, again.dequantize(), routed), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_all_tokens_on_one_expert(tokens: int, device: str) -> None:
    experts = Experts(4, 32, 16, None, device)
    logits = torch.zeros(tokens, 4, device=device)
    logits[:, 2] = 9.0
    routed = moe.sort_pairs(moe.route(logits, 1, Routing.SOFTMAX), 4)
    x = torch.randn(tokens, 32, device=device)
    y = grouped(x, experts, routed, GroupedPlan(16, 16, 16, 2, 4))
    torch.testing.assert_close(y, experts.expected(x, routed), atol=1e-4, rtol=1e-4)


def test_a_step_of_padding_only_is_zero(device: str) -> None:
    experts = Experts(4, 32, 16, None, device)
    routed = moe.sort_pairs(
        moe.route(torch.randn(6, 4, device=device), 2, Routing.SOFTMAX, torch.zeros(6, device=device)), 4
    )
    x = torch.full((6, 32), torch.nan, device=device)
    assert grouped(x, experts, routed, GroupedPlan(16, 16, 16, 2, 4)).eq(0).all()
    gated = torch.full((6, 2, 16), torch.nan, device=device)
    assert down_gemv(gated, experts.down, None, routed, GemvPlan(8, 16)).eq(0).all()


@pytest.mark.parametrize("scale", [1e-23, 1e-30])
def test_experts_of_tiny_scales_are_finite(scale: float, device: str) -> None:
    experts = Experts(3, 128, 128, "block", device)
    experts.scales = [torch.full_like(own, scale) for own in experts.scales if own is not None]
    routed = route(5, 3, 2, device)
    x, to, plan = torch.randn(5, 128, device=device), ActivationFormat(FP8, 128), GroupedPlan(16, 128, 128, 2, 4)
    gated = grouped_gate_up(quantize(x, to), experts.gate_up, experts.scales[0], routed, Activation.SILU, plan, to)
    y = combine(grouped_down(gated, experts.down, experts.scales[1], routed, plan), routed)
    assert y.isfinite().all()


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 4), (3, 2, 8), (40, 8, 128), (700, 2, 8)])
def test_the_launch_holds_every_routing(tokens: int, top_k: int, experts: int, block: int) -> None:
    bound = max_blocks(tokens * top_k, experts, block)
    for _ in range(20):
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        counts = ids.flatten().bincount(minlength=experts)
        assert int((-(-counts // block)).sum()) <= bound
    worst = torch.full((tokens * top_k,), 0).bincount(minlength=experts)
    assert int((-(-worst // block)).sum()) <= bound
