"""The whole path of a layer's experts, from router to sum, in random shapes against plain torch, in float32."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from tandem.engine_core.kernels.moe.grouped_gemm import combine, grouped_down, grouped_gate_up
from tandem.engine_core.kernels.moe.route import route, router_partials
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.quantize import quantize
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, GroupedPlan, RouterPlan
from tests.engine_core.kernels.moe.test_experts import FP8, Experts

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
Run = Callable[[Tensor, Routed], Tensor]


def routed_by_kernels(x: Tensor, router: Tensor, top_k: int, routing: Routing, rows: Tensor | None) -> Routed:
    """Route by the kernels, and check it against the oracle, as far as logits are not almost equal."""
    partials, counts = router_partials(x.nan_to_num(), router, RouterPlan(16, 16, 16, 2, 2, 4))
    switch = torch.zeros(1, dtype=torch.int32, device=x.device)
    routed = route(partials, counts, top_k, routing, switch, rows)
    expected = moe.route(partials.sum(0), top_k, routing, rows)
    assert torch.equal(routed.ids, expected.ids)
    torch.testing.assert_close(routed.weights, expected.weights)
    return routed


def shapes(count: int, seed: int) -> list[tuple[int, int, int, int, int, int]]:
    """Return tokens, experts, experts of a token, hidden size, width and the size of a block, of each case."""
    random, found = Random(seed), []
    for _ in range(count):
        experts = random.choice([1, 2, 3, 5, 7, 12, 33])
        top_k = random.randint(1, min(experts, 4))
        tokens, block = random.choice([1, 2, 4, 9, 21]), random.choice([16, 32])
        found.append((tokens, experts, top_k, 4 * random.randint(3, 12), random.randint(5, 40), block))
    return found


def padding_of(tokens: int, case: int, device: str) -> Tensor | None:
    """Return rows of which the first is padding in every other case."""
    if case % 2 or tokens == 1:
        return None
    return torch.arange(tokens, device=device, dtype=torch.int32) % 4


@pytest.mark.parametrize("granularity", [None, "output", "block"])
def test_any_shape_equals_the_oracle(granularity: str | None, device: str) -> None:
    cases = shapes(6, seed={None: 1, "output": 2, "block": 3}[granularity])
    for case, (tokens, count, top_k, hidden, width, block) in enumerate(cases):
        experts = Experts(count, hidden, width, granularity, device)
        x, router = torch.randn(tokens, hidden, device=device), torch.randn(count, hidden, device=device)
        rows, routing = padding_of(tokens, case, device), list(Routing)[case // 2 % 2]
        routed = routed_by_kernels(x, router, top_k, routing, rows)
        expected = experts.expected(x, routed)
        if rows is not None:
            x[rows == 0] = torch.nan
        for run in paths(experts, block, tokens):
            found = run(x, routed)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=str(cases[case]))
            assert rows is None or found[rows == 0].eq(0).all()


def paths(experts: Experts, block: int, tokens: int) -> list[Run]:
    """Return the two ways to run experts: one pair at a time, for a few tokens, and in blocks."""
    width, scales = experts.down.shape[2], experts.scales

    def blocks(x: Tensor, routed: Routed) -> Tensor:
        plan = GroupedPlan(block, 32, 32, 2, 4)
        hidden = grouped_gate_up(x, experts.gate_up, scales[0], routed, Activation.SILU, plan)
        return combine(grouped_down(hidden, experts.down, scales[1], routed, plan), routed)

    def pairs(x: Tensor, routed: Routed) -> Tensor:
        plan = GemvPlan(16, 32)
        hidden = gate_up_gemv(x, experts.gate_up, scales[0], routed, Activation.SILU, plan)
        hidden[routed.ids < 0] = torch.nan
        return down_gemv(hidden, experts.down, scales[1], routed, GemvPlan(16, 16 if width > 20 else 64))

    return [blocks, pairs] if tokens <= 4 else [blocks]


def quantized(experts: Experts) -> Run:
    """Return the way with activations in 8 bits."""
    to, plan = ActivationFormat(FP8, 128), GroupedPlan(16, 128, 128, 2, 4)

    def run(x: Tensor, routed: Routed) -> Tensor:
        given = experts.gate_up, experts.scales[0], routed, Activation.SILU, plan, to
        hidden = grouped_gate_up(quantize(x, to), *given)
        return combine(grouped_down(hidden, experts.down, experts.scales[1], routed, plan), routed)

    return run


@pytest.mark.parametrize("name", ["pairs", "blocks", "pairs in FP8", "blocks in FP8", "quantized"])
def test_no_bit_of_a_row_depends_on_other_rows_or_on_its_place(name: str, device: str) -> None:
    """Rows are permuted, and all others replaced, by padding too; two runs are equal."""
    granularity = None if "FP8" not in name and name != "quantized" else "block"
    hidden, width = (128, 128) if name == "quantized" else (32, 20)
    experts = Experts(5, hidden, width, granularity, device)
    tokens = 4 if "pairs" in name else 7 if name == "quantized" else 18
    run = quantized(experts) if name == "quantized" else paths(experts, 16, 4)["pairs" in name]
    x, logits = torch.randn(tokens, hidden, device=device), torch.randn(tokens, 5, device=device)
    every = torch.ones(tokens, dtype=torch.int32, device=device)

    def routed_run(x: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        counts, switch = (torch.zeros(size, dtype=torch.int32, device=device) for size in (5, 1))
        return run(x, route(logits[None].contiguous(), counts, 3, Routing.TOP_K_SOFTMAX, switch, rows))

    first = routed_run(x, logits, every)
    assert torch.equal(routed_run(x, logits, every), first)
    order = torch.randperm(tokens, device=device)
    assert torch.equal(routed_run(x[order], logits[order], every), first[order])
    for kept in (0, tokens - 1):
        other, scores = torch.randn_like(x), torch.randn_like(logits)
        other[kept], scores[kept] = x[kept], logits[kept]
        assert torch.equal(routed_run(other, scores, every)[kept], first[kept])
        alone = torch.zeros_like(every)
        alone[kept] = 1
        assert torch.equal(routed_run(other, scores, alone)[kept], first[kept]), "all others are padding"


def test_experts_without_tokens_are_not_read(device: str) -> None:
    """All tokens have the last of an odd number of experts, and the weights of the others are NaN."""
    experts = Experts(7, 48, 20, None, device)
    experts.gate_up[:6] = experts.down[:6] = torch.nan
    for tokens in (1, 4, 50):
        logits = torch.zeros(tokens, 7, device=device)
        logits[:, 6] = 5.0
        routed = moe.sort_pairs(moe.route(logits, 1, Routing.SOFTMAX), 7)
        x = torch.randn(tokens, 48, device=device)
        for run in paths(experts, 16, tokens):
            torch.testing.assert_close(run(x, routed), experts.expected(x, routed), atol=1e-4, rtol=1e-4)
