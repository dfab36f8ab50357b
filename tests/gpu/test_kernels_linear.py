"""The decode products in the dtypes that models use, against float32, and what graphs and replays ask of them."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv, gemv_silu_mul, norm_gemv
from tandem.engine_core.kernels.linear.plans import GemvPlan, SplitKPlan, workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.reference.layer import add_rms_norm, rms_norm, silu_mul
from tandem.engine_core.layers import cuda_linear
from tandem.engine_core.layers.cuda_linear import TritonMethod

pytestmark = pytest.mark.gpu

EPS = 1e-5
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
"""Relative error, ||y - exact|| / ||exact||: rounding the result alone costs 1.7e-3, 2e-4 and 3e-8."""
FUSED_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 4e-6}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALVES = DTYPES[:2]


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(rows + outputs + inputs)
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) * inputs**-0.5
    return x, weight, torch.randn(outputs, device="cuda", dtype=dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32 (float64 for float32 operands)."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    y = x.to(wide) @ weight.to(wide).T
    return y if bias is None else y + bias.to(wide)


def error(y: Tensor, exact: Tensor) -> float:
    """Relative, in the norm; NaN never passes a comparison."""
    return ((y.to(exact.dtype) - exact).norm() / exact.norm()).item()


def workspace(rows: int, outputs: int, plan: SplitKPlan, silu: bool = False) -> tuple[Tensor, Tensor]:
    floats, counters = workspace_size(rows, outputs, plan, silu)
    poison = torch.full((max(floats, 1),), float("nan"), device="cuda")
    return poison, torch.zeros(max(counters, 1), dtype=torch.int32, device="cuda")


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [GemvPlan(4, 1024), GemvPlan(2, 512), GemvPlan(8, 2048, 2, 8)])
@pytest.mark.parametrize(("outputs", "inputs"), [(3072, 2048), (1001, 1984)])
def test_gemv(outputs: int, inputs: int, plan: GemvPlan, dtype: torch.dtype) -> None:
    x, weight, bias = operands(1, outputs, inputs, dtype)
    assert error(gemv(x, weight, bias, plan), product(x, weight, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2048, 2560])
def test_gemv_behind_a_norm_and_before_silu(inputs: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(1, 4098, inputs, dtype)
    norm_weight, residual = (torch.randn(inputs, device="cuda", dtype=dtype) for _ in range(2))
    plan = GemvPlan(4, 1 << (inputs - 1).bit_length(), 2)
    normed, total = add_rms_norm(x, residual[None], norm_weight, EPS)
    gated = product(normed, weight, None)
    y, stream = add_norm_gemv(x, residual[None], norm_weight, EPS, weight, None, plan)
    assert error(y, gated) < FUSED_TOLERANCE[dtype]
    assert torch.equal(stream, total)
    fused = add_norm_gemv(x, residual[None], norm_weight, EPS, weight, None, plan, silu=True)[0]
    assert error(fused, silu_mul(gated)) < FUSED_TOLERANCE[dtype]
    alone = silu_mul(product(rms_norm(x, norm_weight, EPS), weight, None))
    assert error(norm_gemv(x, norm_weight, EPS, weight, None, plan, silu=True), alone) < FUSED_TOLERANCE[dtype]
    assert error(gemv_silu_mul(x, weight, None, plan), silu_mul(product(x, weight, None))) < FUSED_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [2, 7, 16, 33, 64, 128])
@pytest.mark.parametrize("split", [1, 2, 3, 8])
def test_splitk(split: int, rows: int, dtype: torch.dtype) -> None:
    plan = SplitKPlan(64, 128, split, 3)
    x, weight, bias = operands(rows, 1999, 2048, dtype)
    space = workspace(rows, 1999, plan)
    y = splitk_gemm(x, weight, bias, plan, *space)
    assert error(y, product(x, weight, bias)) < TOLERANCE[dtype]
    assert not space[1].any()
    x, weight, _ = operands(rows, 2000, 2048, dtype)
    space = workspace(rows, 1000, plan, True)
    gated = splitk_gemm(x, weight, None, plan, *space, silu=True)
    assert error(gated, silu_mul(product(x, weight, None))) < FUSED_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 8, 24, 64, 128, 300])
def test_method_is_exact_enough_at_every_row_count(rows: int) -> None:
    method = TritonMethod()
    for outputs, inputs in ((3072, 2048), (2048, 8192), (520, 1032), (70, 50)):
        x, weight, bias = operands(rows, outputs, inputs, torch.bfloat16)
        slot = method.allocate(outputs, inputs, x.device, x.dtype)
        slot.copy_(weight)
        for chosen in (None, bias):
            assert error(method.apply(x, slot, chosen), product(x, weight, chosen)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 30, 64, 100])
def test_method_behind_a_norm(rows: int, gated: bool) -> None:
    method = TritonMethod()
    for width, inputs in ((4096, 2048), (6144, 2560), (520, 1032)):
        x, weight, bias = operands(rows, 2 * width, inputs, torch.bfloat16)
        slot = method.allocate(2 * width, inputs, x.device, x.dtype).copy_(weight)
        norm_weight, residual = torch.rand_like(x[0]) + 0.5, torch.randn_like(x)
        for before in (None, residual):
            y, stream = method.apply_normed(x, before, norm_weight, EPS, slot, bias, gated)
            normed, total = (
                (rms_norm(x, norm_weight, EPS), x) if before is None else add_rms_norm(x, before, norm_weight, EPS)
            )
            exact = product(normed, weight, bias)
            assert error(y, silu_mul(exact) if gated else exact) < FUSED_TOLERANCE[torch.bfloat16]
            assert torch.equal(stream, total)


def chain(method: TritonMethod, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Products that depend on each other, with no pause between."""
    for weight in weights:
        x = method.apply(x, weight, None)
    return x


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64])
def test_graphs_replay_bit_for_bit(rows: int) -> None:
    method = TritonMethod()
    shapes = [(2048, 2048), (8192, 2048), (2048, 8192)] * 4
    weights = [method.allocate(*shape, torch.device("cuda"), torch.bfloat16) for shape in shapes]
    for weight in weights:
        weight.normal_(std=weight.shape[1] ** -0.5)
    inputs = [torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    eager = [chain(method, x, weights) for x in inputs]
    fixed = torch.empty_like(inputs[0])
    graphs, results = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(chain(method, fixed, weights))
    for repeat in range(150):
        fixed.copy_(inputs[repeat % 3])
        graphs[repeat % 2].replay()
        assert torch.equal(results[repeat % 2], eager[repeat % 3])


def test_method_allocates_nothing_once_built() -> None:
    method = TritonMethod()
    weight = method.allocate(2048, 8192, torch.device("cuda"), torch.bfloat16).normal_()
    x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    method.apply(x, weight, None)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(20):
        method.apply(x, weight, None)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_a_later_weight_does_not_shrink_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cuda_linear, "splitk_gemm", lambda *args, **kwargs: calls.append(splitk_gemm(*args, **kwargs)))
    method = TritonMethod()
    weight = method.allocate(2048, 8192, torch.device("cuda"), torch.bfloat16).normal_()
    method.allocate(128256, 2048, torch.device("cuda"), torch.bfloat16)
    method.apply(torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16), weight, None)
    assert len(calls) == 1
