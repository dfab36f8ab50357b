"""Mixtures of experts on a GPU: kernels against oracles, and graphs against eager runs."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY
from tandem.engine_core.kernels.moe.routing import Routed, Routing
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import NARROW_BLOCK, GemvPlan, GroupedPlan
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme
from tandem.engine_core.runtime.device import read_gpu_traits
from tests.engine_core.kernels.moe import test_int4_experts as int4

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
EXPERTS, TOP_K, HIDDEN = 96, 6, 1024
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
BLOCKS = EightBitScheme("fp8", Activations.TOKEN, "weight_scale_inv", block=(128, 128))
CHANNELS = EightBitScheme("fp8", Activations.TOKEN)
TOKENS = (1, 4, 5, 16, 100, 700, 3000)


class Network:
    """A network with random weights."""

    def __init__(self, scheme: EightBitScheme | None, width: int, top_k: int = TOP_K, shared: bool = False) -> None:
        gpu = read_gpu_traits()
        if scheme is not None and gpu.capability < FP8_CAPABILITY:
            pytest.skip("this GPU has no FP8")
        context = triton_build_context(DEVICE, torch.bfloat16, gpu, None if scheme is None else Quantization(scheme))
        torch.manual_seed(width)
        self.top_k, self.shared = top_k, shared
        self.experts = context.experts("experts", EXPERTS, HIDDEN, width, Activation.SILU, PROJECTIONS, int(shared))
        for slot in self.experts.slots("", PROJECTIONS):
            noise = torch.randn(slot.target.shape, device=DEVICE)
            slot.target.copy_(
                noise * 0.03 if scheme is None else noise if "scale" not in slot.name else noise.abs() / 30
            )
        router = torch.randn(EXPERTS + shared, HIDDEN, device=DEVICE, dtype=torch.bfloat16) * 0.05
        self.norm = RMSNorm.build(HIDDEN, 1e-6, context)
        self.norm.weight.fill_(1.0)
        given = top_k, Routing.TOP_K_SOFTMAX, PROJECTIONS, RoutingSwitch.build(DEVICE), 0, context.kernels
        self.mlp = MixtureOfExperts(router, self.experts, *given, None, shared)

    def route(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Routed]:
        mlp, residual = self.mlp, torch.zeros_like(x)
        given = x, residual, self.norm.weight, self.norm.eps, mlp.router, self.top_k, mlp.routing
        needs = None, len(x) > 4, self.shared
        normed, _, routed, _ = mlp.kernels.norm_and_route(*given, mlp.switch.flag, rows, 0, *needs)
        return normed, routed

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.mlp(x, torch.zeros_like(x), self.norm, rows)[0]


@pytest.mark.parametrize("width", [768, 176])
@pytest.mark.parametrize("scheme", [None, CHANNELS, BLOCKS], ids=["bf16", "channels", "blocks"])
def test_experts_are_exact_enough_and_rows_independent(scheme: EightBitScheme | None, width: int) -> None:
    network = Network(scheme, width)
    experts = network.experts
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        rows = torch.arange(1, tokens + 1, device=DEVICE, dtype=torch.int32)
        rows[tokens // 2] = 0 if tokens > 1 else 1
        normed, routed = network.route(x, rows)
        logits = moe.router_logits(normed, network.mlp.router)
        chosen = moe.route(logits, TOP_K, Routing.TOP_K_SOFTMAX, rows)
        ordered = logits.sort(1, descending=True).values
        sure = (ordered[:, TOP_K - 1] - ordered[:, TOP_K]) > 1e-4
        same = (chosen.ids.sort(1).values == routed.ids.sort(1).values).all(1)
        assert same[sure].all()
        found = network(x, rows)
        wide = (part if scheme is not None else part.float() for part in (experts.gate_up, experts.down))  # type: ignore[attr-defined]
        scales = experts.gate_up_scales, experts.down_scales  # type: ignore[attr-defined]
        expected = moe.run_experts(normed.float(), *wide, routed, Activation.SILU, *scales)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error < (0.01 if scheme is None or tokens <= 4 or width % 128 else 0.07), (tokens, error)
        assert found[rows == 0].eq(0).all()
        order = torch.randperm(tokens, device=DEVICE)
        assert torch.equal(network(x[order], rows[order]), found[order]), tokens
        other = torch.where((rows == 1)[:, None], x, torch.randn_like(x))
        assert torch.equal(network(other, rows)[0], found[0]), tokens


@pytest.mark.parametrize("top_k", [8, 10])
@pytest.mark.parametrize("scheme", [None, CHANNELS, BLOCKS], ids=["bf16", "channels", "blocks"])
def test_a_shared_expert_among_the_others_is_exact_enough(scheme: EightBitScheme | None, top_k: int) -> None:
    network = Network(scheme, 512, top_k, shared=True)
    experts, router = network.experts, network.mlp.router
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        rows = torch.arange(1, tokens + 1, device=DEVICE, dtype=torch.int32)
        rows[tokens // 2] = 0 if tokens > 1 else 1
        normed, routed = network.route(x, rows)
        logits = moe.router_logits(normed, router)
        chosen = moe.route(logits[:, :-1], top_k, Routing.TOP_K_SOFTMAX, rows, logits[:, -1])
        assert torch.equal(routed.ids[:, -1], chosen.ids[:, -1])
        torch.testing.assert_close(routed.weights[:, -1], chosen.weights[:, -1], atol=1e-4, rtol=1e-4)
        found = network(x, rows)
        wide = (part if scheme is not None else part.float() for part in (experts.gate_up, experts.down))  # type: ignore[attr-defined]
        scales = experts.gate_up_scales, experts.down_scales  # type: ignore[attr-defined]
        expected = moe.run_experts(normed.float(), *wide, routed, Activation.SILU, *scales)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error < (0.01 if scheme is None or tokens <= 4 else 0.07), (tokens, error)
        assert found[rows == 0].eq(0).all()
        order = torch.randperm(tokens, device=DEVICE)
        assert torch.equal(network(x[order], rows[order]), found[order]), tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_experts_are_exact_enough(group: int, dtype: torch.dtype) -> None:
    """With inputs of 16 bits, for which values are unpacked by other instructions than in float32."""
    experts = int4.Experts(96, HIDDEN, 768, (group, group), "cuda")
    for tokens in (1, 4, 5, 8, 16, 200):
        routed = int4.route(tokens, 96, TOP_K, "cuda", padding=tokens > 1)
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=dtype)
        expected = experts.expected(x.float(), routed)
        found = {"gemv": int4.gemv(x, experts, routed, (GemvPlan(4, 1024), GemvPlan(8, 1024)))} if tokens <= 8 else {}
        found["grouped"] = int4.grouped(x, experts, routed, GroupedPlan(16, 64, 128, 3, 4))
        for size in (32, 64, 128):
            found[f"narrow {size}"] = int4.narrow(x, experts, routed, GroupedPlan(NARROW_BLOCK, size, 128, 3, 4))
        for name, result in found.items():
            error = float((result.float() - expected).norm() / expected.norm())
            assert error < 0.01, (name, tokens, error)


def test_two_captured_paths_replayed_alternately_repeat_their_bits() -> None:
    network = Network(None, 768)
    inputs, graphs, outputs, first = {}, {}, {}, {}
    for tokens in (2, 64, 2):
        inputs[tokens] = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    for tokens, x in inputs.items():
        network(x)
        torch.cuda.synchronize()
        graphs[tokens] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[tokens]):
            outputs[tokens] = network(x)
    for repeat in range(5):
        for tokens, graph in graphs.items():
            graph.replay()
            torch.cuda.synchronize()
            if repeat == 0:
                first[tokens] = outputs[tokens].clone()
            assert torch.equal(outputs[tokens], first[tokens])
    for tokens, x in inputs.items():
        assert torch.equal(network(x), first[tokens])
