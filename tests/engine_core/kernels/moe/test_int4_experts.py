"""Kernels of experts with int4 weights against their dequantized weights, in float32."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.kernels.moe.grouped_gemm import combine
from tandem.engine_core.kernels.moe.int4_gemv import int4_pair_gemv
from tandem.engine_core.kernels.moe.int4_grouped_gemm import int4_grouped_gemm
from tandem.engine_core.kernels.moe.int4_narrow_gemm import int4_narrow_gemm
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.plans import choose_expert_plan
from tandem.engine_core.kernels.moe.routing import Routed
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import NARROW_BLOCK, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import ExpertKey
from tandem.engine_core.layers.int4_experts import dequantized
from tandem.engine_core.quantization.int4 import pack, unpack
from tests.engine_core.kernels.moe.test_experts import route, spoil_padding
from tests.fakes.gpus import H200

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
SILU = Activation.SILU


def random_weights(parts: int, outputs: int, inputs: int, group: int, device: str) -> tuple[Int4Weights, Tensor]:
    """Return random weights in the layout of kernels, and their values, [parts, outputs, inputs]."""
    words = torch.randint(-(2**31), 2**31, (parts, outputs, inputs // 8), dtype=torch.int32)
    shape = parts, inputs // group, outputs
    stored = Int4Weights(words, (torch.rand(shape) - 0.5) / inputs**0.5, torch.randint(0, 16, shape, dtype=torch.uint8))
    values = torch.stack([dequantized(stored, part, torch.float32) for part in range(parts)])
    rows = pack(to_kernel_layout(unpack(words.flatten(0, 1)), group)).view(words.shape)
    own = Int4Weights(rows.to(device), stored.scales.to(device), stored.zeros.to(device))
    return own, values.to(device)


class Experts:
    """Random experts. groups: of the inputs of both matmuls."""

    def __init__(self, experts: int, hidden: int, width: int, groups: tuple[int, int], device: str) -> None:
        torch.manual_seed(experts * hidden + width)
        self.gate_up, first = random_weights(2 * experts, width, hidden, groups[0], device)
        self.down, self.last = random_weights(experts, hidden, width, groups[1], device)
        self.first = first.view(experts, 2 * width, hidden)

    def expected(self, x: Tensor, routed: Routed) -> Tensor:
        return moe.run_experts(x, self.first, self.last, routed, SILU)


def gemv(x: Tensor, experts: Experts, routed: Routed, plans: tuple[GemvPlan, GemvPlan]) -> Tensor:
    hidden = int4_pair_gemv(x, experts.gate_up, routed, SILU, plans[0])
    hidden[(routed.ids < 0).flatten()] = torch.nan
    return combine(int4_pair_gemv(hidden, experts.down, routed, None, plans[1]), routed)


def grouped(x: Tensor, experts: Experts, routed: Routed, plan: GroupedPlan) -> Tensor:
    hidden = int4_grouped_gemm(x, experts.gate_up, routed, SILU, plan)
    hidden[(routed.ids < 0).flatten()] = torch.nan
    return combine(int4_grouped_gemm(hidden, experts.down, routed, None, plan), routed)


def narrow(x: Tensor, experts: Experts, routed: Routed, plan: GroupedPlan) -> Tensor:
    hidden = int4_narrow_gemm(x, experts.gate_up, routed, SILU, plan)
    hidden[(routed.ids < 0).flatten()] = torch.nan
    return combine(int4_narrow_gemm(hidden, experts.down, routed, None, plan), routed)


def close(found: Tensor, expected: Tensor, error: float = 1e-5) -> None:
    """Assert that each element is within a share of the largest one."""
    torch.testing.assert_close(found, expected, atol=error * float(expected.abs().max()), rtol=0)


SIZES = [(64, 32, (32, 32)), (128, 96, (64, 96)), (256, 128, (128, 32)), (160, 40 * 8, (160, 64))]
"""Hidden size, width, and the groups of either; runs of one word and of four, one group of all inputs."""


@pytest.mark.parametrize(
    "plans", [(GemvPlan(32, 128), GemvPlan(64, 128)), (GemvPlan(16, 512), GemvPlan(32, 256, 1, 8))]
)
@pytest.mark.parametrize(("hidden", "width", "groups"), SIZES)
def test_gemv_equals_the_dequantized_weights(
    hidden: int, width: int, groups: tuple[int, int], plans: tuple[GemvPlan, GemvPlan], device: str
) -> None:
    experts, routed = Experts(5, hidden, width, groups, device), route(3, 5, 2, device, padding=True)
    x = spoil_padding(torch.randn(3, hidden, device=device), routed)
    expected = experts.expected(torch.nan_to_num(x), routed)
    # The GEMV accumulates products of float16 (`packed_dot`).
    close(gemv(x, experts, routed, plans), expected, 2.0**-9)


@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("step", [32, 128])
@pytest.mark.parametrize(("hidden", "width", "groups"), SIZES)
def test_grouped_gemm_equals_the_dequantized_weights(
    hidden: int, width: int, groups: tuple[int, int], step: int, block: int, device: str
) -> None:
    experts, routed = Experts(5, hidden, width, groups, device), route(20, 5, 3, device, padding=True)
    x = spoil_padding(torch.randn(20, hidden, device=device), routed)
    expected = experts.expected(torch.nan_to_num(x), routed)
    multiply = narrow if block == NARROW_BLOCK else grouped
    close(multiply(x, experts, routed, GroupedPlan(block, 64, step, 2, 4)), expected)


@pytest.mark.parametrize(("tokens", "experts"), [(8, 5), (5, 64), (1, 3)])
def test_narrow_blocks_of_few_tokens(tokens: int, experts: int, device: str) -> None:
    """A block for each expert if most have pairs, found ones otherwise."""
    own, routed = Experts(experts, 128, 96, (128, 32), device), route(tokens, experts, 2, device)
    x, plan = torch.randn(tokens, 128, device=device), GroupedPlan(NARROW_BLOCK, 32, 128, 2, 1)
    close(narrow(x, own, routed, plan), own.expected(x, routed))


@pytest.mark.parametrize("case", ["one expert", "few pairs", "ties"])
def test_uneven_routings(case: str, device: str) -> None:
    experts = Experts(7, 64, 32, (32, 32), device)
    tokens = 2 if case == "few pairs" else 40
    logits = torch.zeros(tokens, 7, device=device)
    if case == "one expert":
        logits[:, 4] = 1.0
    routed = moe.sort_pairs(moe.route(logits, 1 if case == "one expert" else 2, moe.Routing.TOP_K_SOFTMAX), 7)
    x = torch.randn(tokens, 64, device=device)
    close(grouped(x, experts, routed, GroupedPlan(16, 64, 32, 2, 4)), experts.expected(x, routed))


@pytest.mark.parametrize("block", [NARROW_BLOCK, 16])
def test_a_row_is_bit_equal_whatever_the_others_are(block: int, device: str) -> None:
    experts, plan = Experts(5, 64, 32, (32, 32), device), GroupedPlan(block, 64, 32, 2, 4)
    multiply = narrow if block == NARROW_BLOCK else grouped
    routed = route(20, 5, 3, device)
    x = torch.randn(20, 64, device=device)
    order = torch.randperm(20).to(device)
    moved = moe.sort_pairs(Routed(routed.ids[order], routed.weights[order]), 5)
    assert torch.equal(multiply(x, experts, routed, plan)[order], multiply(x[order], experts, moved, plan))
    before = multiply(x, experts, routed, plan)[0]
    x[1:] = torch.randn(19, 64, device=device)
    assert torch.equal(multiply(x, experts, routed, plan)[0], before)


@pytest.mark.parametrize("tokens", [1, 4, 8, 64, 256, 8192])
@pytest.mark.parametrize("sizes", [(2048, 768, 128, 8), (2048, 512, 256, 8), (2880, 2880, 32, 4), (4096, 1536, 128, 8)])
def test_the_rule_has_a_plan_for_each_size(tokens: int, sizes: tuple[int, int, int, int]) -> None:
    for part in ("gate_up", "down"):
        plan = choose_expert_plan(ExpertKey(part, 4, 16, *sizes, tokens), H200)  # type: ignore[arg-type]
        assert isinstance(plan, GemvPlan if tokens <= 4 else GroupedPlan)
        assert plan.block_k % 128 == 0
        is_measured = sizes == (2048, 768, 128, 8) and tokens == 8
        assert isinstance(plan, GemvPlan) or (plan.block_m == NARROW_BLOCK) == is_measured
