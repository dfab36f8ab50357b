"""The decode matmuls in models' dtypes, against float32, and their requirements for graphs and replays."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.reference import layer as oracle
from tandem.engine_core.kernels.reference.layer import add_rms_norm, gated_activation, rms_norm
from tandem.engine_core.kernels.soft_cap import soft_cap
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.layers import triton_linear
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.triton_linear import TritonLinear
from tandem.engine_core.runtime.device import read_gpu_traits

pytestmark = pytest.mark.gpu

EPS = 1e-5
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
"""Relative error, ||y - exact|| / ||exact||: rounding the result alone costs 1.7e-3, 2e-4 and 3e-8."""
FUSED_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 4e-6}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and bias."""
    torch.manual_seed(rows + outputs + inputs)
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) * inputs**-0.5
    return x, weight, torch.randn(outputs, device="cuda", dtype=dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the matmul in float32 (float64 for float32 operands)."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    y = x.to(wide) @ weight.to(wide).T
    return y if bias is None else y + bias.to(wide)


def error(y: Tensor, exact: Tensor) -> float:
    """Return the relative error in the norm; NaN never passes a comparison."""
    return ((y.to(exact.dtype) - exact).norm() / exact.norm()).item()


def workspace(rows: int, outputs: int, plan: SplitKPlan, gated: bool = False) -> tuple[Tensor, Tensor]:
    floats, counters = workspace_size(rows, outputs, plan, gated)
    poison = torch.full((max(floats, 1),), float("nan"), device="cuda")
    return poison, torch.zeros(max(counters, 1), dtype=torch.int32, device="cuda")


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [GemvPlan(4, 1024), GemvPlan(2, 512), GemvPlan(8, 2048, 2, 8)])
@pytest.mark.parametrize(("outputs", "inputs"), [(3072, 2048), (1001, 1984)])
def test_gemv_is_exact_enough(outputs: int, inputs: int, plan: GemvPlan, dtype: torch.dtype) -> None:
    x, weight, bias = operands(1, outputs, inputs, dtype)
    assert error(gemv(x, weight, bias, plan, pdl=True), product(x, weight, bias)) < TOLERANCE[dtype]


def new_context() -> BuildContext:
    return triton_build_context(torch.device("cuda"), torch.bfloat16, read_gpu_traits())


def linear_of(context: BuildContext, outputs: int, inputs: int, bias: Tensor | None = None) -> TritonLinear:
    """Build random weights scaled as a trained layer's, with a copy of a bias."""
    linear = context.linear("proj", outputs, inputs, bias is not None)
    assert isinstance(linear, TritonLinear)
    linear.weight.normal_(std=inputs**-0.5)
    if linear.bias is not None and bias is not None:
        linear.bias.copy_(bias)
    return linear


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2048, 2560])
def test_gemv_behind_a_norm_and_before_an_activation_is_exact_enough(
    inputs: int, dtype: torch.dtype, activation: Activation
) -> None:
    x, weight, _ = operands(1, 4098, inputs, dtype)
    norm_weight, residual = (torch.randn(inputs, device="cuda", dtype=dtype) for _ in range(2))
    plan = GemvPlan(4, 1 << (inputs - 1).bit_length(), 2)
    normed, total = add_rms_norm(x, residual[None], norm_weight, EPS)
    exact = product(normed, weight, None)
    given = (x, residual[None], None, norm_weight, EPS, weight, None, plan)
    y, stream = normed_gemv(*given, pdl=True)
    assert error(y, exact) < FUSED_TOLERANCE[dtype]
    assert torch.equal(stream, total)
    fused = normed_gemv(*given, activation, pdl=True)[0]
    assert error(fused, gated_activation(exact, activation)) < FUSED_TOLERANCE[dtype]
    alone = gated_activation(product(rms_norm(x, norm_weight, EPS), weight, None), activation)
    y, stream = normed_gemv(x, None, None, norm_weight, EPS, weight, None, plan, activation, pdl=True)
    assert error(y, alone) < FUSED_TOLERANCE[dtype] and stream is x
    without_norm = gated_activation(product(x, weight, None), activation)
    assert error(gemv(x, weight, None, plan, activation, pdl=True), without_norm) < FUSED_TOLERANCE[dtype]


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize(
    ("inputs", "dtype", "norms"),
    [
        *((2560, torch.bfloat16, norms) for norms in range(3)),
        *((2560, dtype, 2) for dtype in DTYPES[1:]),
        (3072, torch.bfloat16, 1),
    ],
)
def test_gemv_in_chunks_behind_norms_is_exact_enough(
    inputs: int, dtype: torch.dtype, norms: int, activation: Activation | None
) -> None:
    """norms: 0 of x alone, 1 of x added to the stream, 2 of x normalized and added to it."""
    x, weight, bias = operands(1, 4098, inputs, dtype)
    factors, norm_weight = (torch.rand(inputs, device="cuda") + 0.5 for _ in range(2))
    residual = torch.randn(1, inputs, device="cuda", dtype=dtype)
    if norms == 0:
        normed, total = rms_norm(x, norm_weight, EPS), x
    elif norms == 1:
        normed, total = add_rms_norm(x, residual, norm_weight, EPS)
    else:
        normed, total = oracle.norm_add_rms_norm(x, factors, residual, norm_weight, EPS)
    exact = product(normed, weight, bias)
    exact = exact if activation is None else gated_activation(exact, activation)
    plan = GemvPlan(4, 1024, 2) if activation is None else GemvPlan(4, 1024)
    given = (x, residual if norms else None, factors if norms == 2 else None, norm_weight, EPS, weight, bias)
    y, stream = normed_gemv(*given, plan, activation, True)
    assert error(y, exact) < FUSED_TOLERANCE[dtype]
    assert error(stream, total.double()) < FUSED_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [2, 7, 16, 33, 64, 128])
@pytest.mark.parametrize(
    ("split", "dtype"), [*((split, torch.bfloat16) for split in (1, 2, 3, 8)), (1, torch.float16), (3, torch.float16)]
)
def test_splitk_is_exact_enough(split: int, rows: int, dtype: torch.dtype) -> None:
    plan = SplitKPlan(64, 128, split, 3)
    x, weight, bias = operands(rows, 1999, 2048, dtype)
    space = workspace(rows, 1999, plan)
    y = splitk_gemm(x, weight, bias, plan, *space, pdl=True)
    assert error(y, product(x, weight, bias)) < TOLERANCE[dtype]
    assert not space[1].any()
    x, weight, _ = operands(rows, 2000, 2048, dtype)
    space = workspace(rows, 1000, plan, True)
    exact = product(x, weight, None)
    for activation in Activation:
        gated = splitk_gemm(x, weight, None, plan, *space, activation=activation, pdl=True)
        assert error(gated, gated_activation(exact, activation)) < FUSED_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 8, 24, 64, 128, 300])
def test_linear_is_exact_enough_at_every_row_count(rows: int) -> None:
    context = new_context()
    for outputs, inputs in ((3072, 2048), (2048, 8192), (520, 1032), (70, 50)):
        x, _, bias = operands(rows, outputs, inputs, torch.bfloat16)
        for chosen in (None, bias):
            linear = linear_of(context, outputs, inputs, chosen)
            assert error(linear.apply(x), product(x, linear.weight, chosen)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize("rows", [1, 5, 30, 64, 100])
def test_linear_behind_a_norm_is_exact_enough(rows: int, activation: Activation | None) -> None:
    context = new_context()
    for width, inputs in ((4096, 2048), (6144, 2560), (520, 1032)):
        x, _, bias = operands(rows, 2 * width, inputs, torch.bfloat16)
        linear = linear_of(context, 2 * width, inputs, bias)
        norm_weight, residual = torch.rand_like(x[0]) + 0.5, torch.randn_like(x)
        norm = RMSNorm(norm_weight, EPS, context.kernels)
        for before in (None, residual):
            y, stream = linear.apply_normed(x, before, norm, activation)
            normed, total = (
                (rms_norm(x, norm_weight, EPS), x) if before is None else add_rms_norm(x, before, norm_weight, EPS)
            )
            exact = product(normed, linear.weight, bias)
            expected = exact if activation is None else gated_activation(exact, activation)
            assert error(y, expected) < FUSED_TOLERANCE[torch.bfloat16]
            assert torch.equal(stream, total)


@pytest.mark.parametrize("activation", [None, Activation.GELU_TANH])
@pytest.mark.parametrize("rows", [1, 2, 64, 300])
def test_linear_behind_a_sandwich_of_norms_is_exact_enough(rows: int, activation: Activation | None) -> None:
    """Gemma's norms multiply in float32 and round once; the sizes are those of its 1B, 2B, 4B and 9B models."""
    context = new_context()
    for inputs in (1152, 2304, 2560, 3584):
        x, _, _ = operands(rows, 4096, inputs, torch.bfloat16)
        linear = linear_of(context, 4096, inputs)
        residual = torch.randn_like(x)
        norms = [RMSNorm(torch.rand(inputs, device="cuda") + 0.5, EPS, context.kernels) for _ in range(2)]
        y, stream = linear.apply_normed(x, residual, SandwichNorm(*norms), activation)
        normed, total = oracle.norm_add_rms_norm(x, norms[0].weight, residual, norms[1].weight, EPS)
        exact = product(normed, linear.weight, None)
        expected = exact if activation is None else gated_activation(exact, activation)
        assert error(y, expected) < FUSED_TOLERANCE[torch.bfloat16]
        assert error(stream, total.float()) < 5e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_rounds_as_its_oracle(dtype: torch.dtype) -> None:
    logits = (torch.randn(64, 262144, device="cuda") * 40).to(dtype)
    expected = oracle.soft_cap(logits.clone(), 30.0)
    found = soft_cap(logits, 30.0, pdl=True)
    assert found is logits
    steps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=2 * steps[dtype])
    if dtype.itemsize == 2:
        assert (found == expected).float().mean() > 0.99


def chain(linears: list[LinearWeights], x: Tensor) -> Tensor:
    """Run matmuls that depend on each other, with no pause between."""
    for linear in linears:
        x = linear.apply(x)
    return x


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64])
def test_graphs_replay_bit_for_bit(rows: int) -> None:
    context = new_context()
    shapes = [(2048, 2048), (8192, 2048), (2048, 8192)] * 4
    linears: list[LinearWeights] = [linear_of(context, *shape) for shape in shapes]
    inputs = [torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    eager = [chain(linears, x) for x in inputs]
    fixed = torch.empty_like(inputs[0])
    graphs, results = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(chain(linears, fixed))
    for repeat in range(150):
        fixed.copy_(inputs[repeat % 3])
        graphs[repeat % 2].replay()
        assert torch.equal(results[repeat % 2], eager[repeat % 3])


def test_linear_allocates_nothing_once_built() -> None:
    linear = linear_of(new_context(), 2048, 8192)
    x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    linear.apply(x)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(20):
        linear.apply(x)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_a_later_weight_does_not_shrink_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        triton_linear, "splitk_gemm", lambda *args, **kwargs: calls.append(splitk_gemm(*args, **kwargs))
    )
    context = new_context()
    linear = linear_of(context, 2048, 8192)
    linear_of(context, 128256, 2048)
    linear.apply(torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16))
    assert len(calls) == 1
