"""A mixture of experts on the CUDA path, interpreted, equals the one in plain torch."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.moe.plans import GEMV_TOKENS, choose_expert_plan
from tandem.engine_core.kernels.moe.routing import Routed, Routing, SharedOutput
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.kernels.tiles.plan_types import ExpertPlan, GemvPlan
from tandem.engine_core.kernels.tiles.table import ExpertKey, ExpertPart, TileTable
from tandem.engine_core.layers import triton_experts, triton_int4_experts
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear_choice import torch_build_context, triton_build_context
from tandem.engine_core.layers.mlp import GatedMLP
from tandem.engine_core.layers.moe import MixtureOfExperts, RoutingSwitch
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.shared_expert import SharedExpert
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme
from tests.fakes.gpus import A100, L4
from tests.support.quantized_checkpoint import GROUP, LAYOUTS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp", "ignore::RuntimeWarning")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SCHEMES = {
    "16 bits": None,
    "outputs": EightBitScheme("fp8", Activations.TOKEN),
    "blocks": EightBitScheme("fp8", Activations.TOKEN, "weight_scale_inv", block=(128, 128)),
    "weights only": EightBitScheme("fp8", Activations.UNQUANTIZED),
}
EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 128, 128


def build(
    context: BuildContext, values: dict[str, Tensor], stacks_shared: bool = False
) -> tuple[MixtureOfExperts, RMSNorm]:
    """Build a network and fill its weights. stacks_shared: whether the last expert is the shared one."""
    given = "model.layers.0.mlp.experts", EXPERTS - stacks_shared, HIDDEN, WIDTH, Activation.SILU, PROJECTIONS
    experts = context.experts(*given, int(stacks_shared))
    router = torch.empty(EXPERTS, HIDDEN, device=context.device)
    switch = RoutingSwitch.build(context.device)
    routing = TOP_K, Routing.TOP_K_SOFTMAX, PROJECTIONS, switch, 3, context.kernels
    mlp = MixtureOfExperts(router, experts, *routing, None, stacks_shared)
    norm = RMSNorm.build(HIDDEN, 1e-6, context)
    router.copy_(values["router"])
    norm.weight.copy_(values["norm"])
    slots = [slot for slot in experts.slots("", PROJECTIONS) if slot.name in values]
    for slot in slots:
        slot.fill(values[slot.name])
    for finish in {slot.on_filled for slot in slots} - {None}:
        assert finish is not None
        finish()
    return mlp, norm


def random_values(scheme: EightBitScheme | None) -> dict[str, Tensor]:
    values = {"router": torch.randn(EXPERTS, HIDDEN), "norm": torch.rand(HIDDEN) + 0.5}
    for expert in range(EXPERTS):
        for name in PROJECTIONS:
            weight, prefix = torch.randn(HIDDEN, WIDTH) * 0.1, f"experts.{expert}.{name}."
            if scheme is None:
                values[f"{prefix}weight"] = weight
                continue
            values[f"{prefix}weight"] = (weight * 100).to(torch.float8_e4m3fn)
            shape = (1, 1) if scheme.block is not None else (HIDDEN, 1)
            values[f"{prefix}{scheme.scale_name}"] = (torch.rand(shape) - 0.5) / 50
    return values


@pytest.mark.parametrize("tokens", [3, 7])
@pytest.mark.parametrize("name", ["gptq_zeros", "packed"])
def test_int4_experts_on_the_cuda_path_equal_plain_torch(name: str, tokens: int, device: str) -> None:
    """Loaded like a checkpoint, so that the words are converted to the kernels' layout."""
    torch.manual_seed(tokens)
    layout = LAYOUTS[name]
    scheme = Int4Scheme("gptq" if "gptq" in name else "compressed-tensors", GROUP, "zeros" not in name, zero_offset=1)
    values = random_values(None)
    for key in [key for key in values if key.startswith("experts.")]:
        stem = key.removesuffix("weight")
        tensors, _ = layout.write(values.pop(key), len(values))
        values |= {stem + last: tensor.contiguous() for last, tensor in tensors.items()}
    quantization = Quantization(scheme)
    expected = build(torch_build_context(torch.device("cpu"), torch.float32, quantization), values)
    found = build(triton_build_context(torch.device(device), torch.float32, A100, quantization), values)
    x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    rows = torch.arange(tokens, dtype=torch.int32) % 3
    one = expected[0](x, residual, expected[1], rows)
    other = found[0](x.to(device), residual.to(device), found[1], rows.to(device))
    error = float((other[0].cpu() - one[0]).norm() / one[0].norm())
    assert error < (1e-3 if tokens <= 4 else 1e-5), error
    assert other[0].cpu()[rows == 0].eq(0).all()


@pytest.mark.parametrize("tokens", [4, 5])
@pytest.mark.parametrize(
    ("name", "gpu"),
    [("16 bits", A100), ("outputs", A100), ("outputs", L4), ("blocks", A100), ("blocks", L4), ("weights only", L4)],
    ids=str,
)
def test_the_cuda_path_equals_plain_torch(name: str, gpu: GpuTraits, tokens: int, device: str) -> None:
    torch.manual_seed(tokens)
    scheme = SCHEMES[name]
    values, quantization = random_values(scheme), None if scheme is None else Quantization(scheme)
    expected = build(torch_build_context(torch.device("cpu"), torch.float32, quantization), values)
    gpu = replace(gpu, capability=(min(gpu.capability, (8, 9))))
    found = build(triton_build_context(torch.device(device), torch.float32, gpu, quantization), values)
    x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    rows = torch.arange(tokens, dtype=torch.int32) % 4 if tokens > 1 else None
    one = expected[0](x, residual, expected[1], rows)
    other = found[0](x.to(device), residual.to(device), found[1], None if rows is None else rows.to(device))
    # On an L4 the inputs of more than four tokens are rounded to 8 bits.
    rounded = gpu is not A100 and tokens > 4 and scheme is not None and name != "weights only"
    error = float((other[0].cpu() - one[0]).norm() / one[0].norm())
    assert error < (0.06 if rounded else 1e-5), error
    assert torch.equal(other[1].cpu(), one[1])
    if rows is not None:
        assert other[0].cpu()[rows == 0].eq(0).all()


STACKED: dict[str, EightBitScheme | Int4Scheme | None] = {
    "16 bits": None,
    "blocks": SCHEMES["blocks"],
    "int4": Int4Scheme("gptq", GROUP, symmetric=True),
}


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("name", STACKED)
def test_a_shared_expert_among_the_others_equals_one_of_its_own(name: str, tokens: int, device: str) -> None:
    """With kernels and in plain torch; padding gets zeros."""
    torch.manual_seed(tokens)
    quantization = None if (scheme := STACKED[name]) is None else Quantization(scheme)
    contexts = [
        torch_build_context(torch.device("cpu"), torch.float32, quantization),
        triton_build_context(torch.device(device), torch.float32, A100, quantization),
    ]
    values = {"router": torch.randn(EXPERTS, HIDDEN), "norm": torch.rand(HIDDEN) + 0.5}
    stacked = [build(context, values, stacks_shared=True) for context in contexts]
    plain, norm = build(contexts[0], values)
    pairs = [mlp.experts.slots("", PROJECTIONS) for mlp in (plain, stacked[0][0], stacked[1][0])]
    for slots in zip(*pairs, strict=True):
        target = slots[0].target
        integers = target.dtype in (torch.int32, torch.uint8)
        random = torch.randint_like(target, 0, 9) if integers else (torch.randn(target.shape) / 9).to(target.dtype)
        for slot in slots:
            slot.target.copy_(random)
    if name == "int4":
        stacked[1][0].experts.finish()  # type: ignore[attr-defined]
    x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    rows = torch.arange(1, tokens + 1, dtype=torch.int32) % 3
    normed, _ = contexts[0].kernels.add_rms_norm(x, residual, norm.weight, norm.eps)
    routed = moe.route(moe.router_logits(normed, values["router"][:-1]), TOP_K, Routing.TOP_K_SOFTMAX, rows)
    last = torch.where(rows != 0, EXPERTS - 1, -1).int()[:, None]
    alone = plain.experts.run(normed, Routed(last, (rows != 0).float()[:, None]))
    expected = moe.with_shared_expert(
        plain.experts.run(normed, routed), SharedOutput(alone, normed, values["router"][-1:])
    )
    for (mlp, own), where in zip(stacked, ("cpu", device), strict=True):
        found = mlp(x.to(where), residual.to(where), own, rows.to(where))[0].cpu()
        error = float((found - expected).norm() / expected.norm())
        assert error < (1e-3 if name == "int4" else 1e-5), error
        assert found[rows == 0].eq(0).all()


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("scheme", [None, Int4Scheme("gptq", GROUP, symmetric=True)], ids=["16 bits", "int4"])
def test_experts_add_the_output_of_the_shared_one(scheme: Int4Scheme | None, tokens: int, device: str) -> None:
    torch.manual_seed(tokens)
    context = triton_build_context(
        torch.device(device), torch.float32, A100, None if scheme is None else Quantization(scheme)
    )
    experts = context.experts("experts", EXPERTS, HIDDEN, WIDTH, Activation.SILU, PROJECTIONS)
    for slot in experts.slots("", PROJECTIONS):
        target = slot.target
        target.random_(0, 9) if target.dtype in (torch.int32, torch.uint8) else target.normal_(0, 0.1)
    x, output = (torch.randn(tokens, HIDDEN, device=device) for _ in range(2))
    routed = moe.route(torch.randn(tokens, EXPERTS, device=device), TOP_K, Routing.TOP_K_SOFTMAX)
    routed = routed if tokens <= GEMV_TOKENS else moe.sort_pairs(routed, EXPERTS)
    shared = SharedOutput(output, x, torch.randn(1, HIDDEN, device=device) / HIDDEN**0.5)
    expected = moe.with_shared_expert(experts.run(x, routed), shared)
    torch.testing.assert_close(experts.run(x, routed, shared), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 6])
def test_the_shared_expert_reads_inputs_that_the_router_has_quantized(tokens: int, device: str) -> None:
    torch.manual_seed(tokens)
    scheme = SCHEMES["blocks"]
    assert scheme is not None
    context = triton_build_context(torch.device(device), torch.float32, L4, Quantization(scheme))
    gate_up, down = (
        context.linear(f"{name}_proj", 2 * WIDTH // size, WIDTH) for name, size in (("gate_up", 1), ("down", 2))
    )
    for linear in (gate_up, down):
        for slot in linear.slots("", "proj"):
            slot.target.copy_((torch.randn(slot.target.shape, device=device) / 20).abs().to(slot.target.dtype))
            if slot.on_filled is not None:
                slot.on_filled()
    network = GatedMLP(gate_up, down, WIDTH, Activation.SILU, context.kernels)
    expert = SharedExpert(network, torch.randn(1, HIDDEN, device=device))
    x, to = torch.randn(tokens, HIDDEN, device=device), ActivationFormat(torch.float8_e4m3fn, 128)
    expected = expert.run(x, None).output
    zeros = context.kernels.quantize(torch.zeros_like(x), to)
    assert torch.equal(expert.run(x, None, context.kernels.quantize(x, to), to).output, expected)
    assert bool(expert.run(x, None, zeros, to).output.eq(0).all()) == (tokens > 1), "a single token has 16 bits"
    assert torch.equal(expert.run(x, None, zeros, ActivationFormat(torch.float8_e4m3fn)).output, expected)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_measured_plans_make_pairs_of_more_tokens_gemvs(bits: int, device: str) -> None:
    """With both plans of the table; with one of them pairs are sorted as without any."""
    torch.manual_seed(bits)
    scheme = {16: None, 8: SCHEMES["blocks"], 4: Int4Scheme("gptq", GROUP, symmetric=True)}[bits]
    quantization, tokens = None if scheme is None else Quantization(scheme), 7
    parts: tuple[ExpertPart, ...] = ("gate_up", "down")
    keys = [ExpertKey(part, {16: 32}.get(bits, bits), 16, HIDDEN, WIDTH, EXPERTS, TOP_K, 8) for part in parts]
    plans = dict.fromkeys(keys, GemvPlan(4, 128))
    x, residual = torch.randn(tokens, HIDDEN, device=device), torch.randn(tokens, HIDDEN, device=device)
    rows = torch.arange(tokens, dtype=torch.int32, device=device) % 4
    found: list[Tensor] = []
    for name, table in (("none", {}), ("one", {keys[0]: plans[keys[0]]}), ("both", plans)):
        gpu = replace(A100, tiles=TileTable(f"{bits} {name}", experts=table))
        torch.manual_seed(0)
        context = triton_build_context(torch.device(device), torch.float32, gpu, quantization)
        mlp, norm = build(context, {"router": torch.randn(EXPERTS, HIDDEN), "norm": torch.ones(HIDDEN)})
        for slot in mlp.experts.slots("", PROJECTIONS):
            target = slot.target
            integers = target.dtype in (torch.int32, torch.uint8)
            target.random_(0, 9) if integers else target.copy_(torch.randn(target.shape, device=device) / 9)
        # The table's key has activations of 16 bits, these have 32.
        assert mlp.experts.needs_sorted(tokens, TOP_K) == (name != "both")
        with patch.object(triton_experts, "_choose", bits_16), patch.object(triton_int4_experts, "_choose", bits_16):
            found.append(mlp(x, residual, norm, rows)[0])
    assert torch.equal(found[0], found[1])
    error = float((found[2] - found[0]).norm() / found[0].norm())
    assert error < (1e-3 if bits == 4 else 1e-5), error


def bits_16(key: ExpertKey, gpu: GpuTraits) -> ExpertPlan:
    return choose_expert_plan(key._replace(x_bits=16), gpu)
