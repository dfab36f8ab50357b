"""Quantized weights on CUDA: matmuls against dequantized weights, and a model in FP8."""

from copy import copy
from itertools import product
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec import structs
from tokenizers import Tokenizer

from benchmarks.default_model.quantization import plain_folder
from tandem.engine_core.attention import triton as attention_steps
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.linear import quantized_plans
from tandem.engine_core.kernels.linear.int4_layout import from_kernel_layout
from tandem.engine_core.kernels.linear.quantized_plans import MAX_W8A16_ROWS, SCALE_ROWS, choose_w8a8_gemm
from tandem.engine_core.kernels.linear.w8a8_splitk import w8a8_matmul
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import quantized_activation as oracle
from tandem.engine_core.kernels.reference.quantized_activation import quantized_matmul
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.quantized import triton_eight_bit_linear
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.quantized.int4_linear import Int4Linear
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitLinear, library_matmul
from tandem.engine_core.layers.quantized.triton_int4_linear import TritonInt4Linear
from tandem.engine_core.layers.quantized.triton_w8a16_linear import TritonW8A16Linear
from tandem.engine_core.layers.quantized.w8a16_linear import W8A16Linear
from tandem.engine_core.layers.unfused_linear import UnfusedLinear
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme, W8A16Scheme
from tandem.engine_core.runtime.cuda_forward import CudaForward
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.eager_places import repeat_mixed
from tests.support.engine_driver import DrivenEngine
from tests.support.gpu_traffic import KINDS, requests
from tests.support.plan_recording import drive, runtime_of
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

pytestmark = pytest.mark.gpu

SCHEMES = {
    "fp8": EightBitScheme("fp8", Activations.TOKEN),
    "fp8_block": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "fp8_static": EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
    "fp8_weights_only": EightBitScheme("fp8", Activations.UNQUANTIZED),
    "int8": EightBitScheme("int8", Activations.TOKEN),
    "gptq": Int4Scheme("gptq", 128, False),
    "gptq_64": Int4Scheme("gptq", 64, False),
    "gptq_32": Int4Scheme("gptq", 32, True),
    "w8a16_128": W8A16Scheme("int8", "gptq", 128),
    "w8a16_32": W8A16Scheme("int8", "compressed-tensors", 32),
    "w8a16_one_group": W8A16Scheme("int8", "gptq", None),
    "w8a16_fp8": W8A16Scheme("fp8", None, 64),
}
ROWS = (1, 2, 16, 33, 64, 65, 100, 191, 256, 300, 1000)
SHAPES = [(6144, 4096), (4096, 14336), (1040, 1024)]
MANY_ROWS = (2, 16, 21, 32, 33, 64, 65, 100, 191, 192, 256, 1000, 2048, 8192)
MANY_SHAPES = [(6144, 4096), (28672, 4096), (4096, 4096), (4096, 14336), (1024, 1024), (1040, 640)]
Linear = TritonEightBitLinear | TritonInt4Linear | TritonW8A16Linear


def linear_of(scheme: Scheme, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Linear:
    """Build random weights with about the magnitude of a trained layer's."""
    context = triton_build_context(torch.device("cuda"), dtype, read_gpu_traits(), Quantization(scheme))
    linear = context.linear("proj", outputs, inputs, True)
    torch.manual_seed(outputs + inputs)
    if isinstance(linear, TritonEightBitLinear):
        linear.values.copy_((torch.randn(outputs, inputs, device="cuda") * 30).clamp(-127, 127).to(linear.values.dtype))
        linear.scales.uniform_(0.5, 1.5).mul_(inputs**-0.5 / 30)
        if linear.scheme.block is not None and outputs % 128 == 0:
            linear.scales.copy_(linear.scales[::8].repeat_interleave(8, 0))
        if linear.input_scale is not None:
            linear.scales.fill_(inputs**-0.5 / 30)
            # The largest of so many normal numbers is below 6.
            linear.input_scale.fill_(6 / 448)
        linear.find_wide_scales()
    elif isinstance(linear, TritonW8A16Linear):
        linear.values.copy_((torch.randn(outputs, inputs, device="cuda") * 30).clamp(-127, 127).to(linear.values.dtype))
        linear.scales.uniform_(0.5, 1.5).mul_(inputs**-0.5 / 30)
    else:
        assert isinstance(linear, TritonInt4Linear)
        linear.words.random_(-(2**31), 2**31 - 1)
        linear.scales.uniform_(0.5, 1.5).mul_(inputs**-0.5 / 5)
        linear.zeros.random_(5, 11)
    assert linear.bias is not None
    linear.bias.normal_()
    return linear


def plain(linear: Linear) -> EightBitLinear | Int4Linear | W8A16Linear:
    """Return the same weights for any device."""
    if isinstance(linear, TritonEightBitLinear):
        return EightBitLinear(linear.values, linear.scales, linear.scheme, linear.bias, torch_kernels())
    if isinstance(linear, TritonW8A16Linear):
        return W8A16Linear(linear.values, linear.scales, linear.scheme, linear.bias, torch_kernels())
    words = pack(from_kernel_layout(unpack(linear.words), linear.group_size))
    return Int4Linear(words, linear.scales, linear.zeros, linear.scheme, linear.bias, torch_kernels())


def error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference over that of the exact result."""
    return float((found.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt())


def tolerance(scheme: Scheme, rows: int) -> float:
    """Return the rounding error of 16-bit outputs, or that of 8-bit inputs."""
    rounds = isinstance(scheme, EightBitScheme) and scheme.activations is not Activations.UNQUANTIZED
    return 0.04 if rounds and rows > MAX_W8A16_ROWS else 0.006


CASES = [
    *product(SCHEMES, SHAPES, [torch.bfloat16]),
    *product([name for name in SCHEMES if name.startswith("gptq")], SHAPES, [torch.float16]),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES)
def test_matmuls_equal_those_of_dequantized_weights(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = linear_of(SCHEMES[name], *shape, dtype)
    weight, bias = plain(linear).dequantized(torch.float32), linear.bias
    assert bias is not None
    assert torch.equal(linear.dequantized(dtype), plain(linear).dequantized(dtype))
    for rows in ROWS:
        x = torch.randn(rows, shape[1], device="cuda", dtype=dtype)
        assert error(linear.apply(x), x.float() @ weight.t() + bias.float()) < tolerance(SCHEMES[name], rows), rows


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_norm_and_gate_equal_separate_operations(name: str, activation: Activation | None) -> None:
    linear = linear_of(SCHEMES[name], 4096, 2048)
    norm = RMSNorm(torch.rand(2048, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5, torch_kernels())
    for rows in ROWS:
        x, residual = (torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for stream in (None, residual):
            y, total = linear.apply_normed(x, stream, norm, activation)
            expected, expected_total = plain(linear).apply_normed(x, stream, norm, activation)
            assert error(y, expected) < 2 * tolerance(SCHEMES[name], rows), rows
            assert torch.equal(total, expected_total)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_static", "int8"])
@pytest.mark.parametrize("shape", [(4096, 2048), (28672, 4096), (2080, 640)])
def test_fused_gate_and_quantization_equal_separate_launches(name: str, shape: tuple[int, int]) -> None:
    linear = linear_of(SCHEMES[name], *shape)
    assert isinstance(linear, TritonEightBitLinear)
    norm = RMSNorm(torch.rand(shape[1], device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5, linear.kernels)
    dtype = linear.values.dtype
    formats = [ActivationFormat(dtype), ActivationFormat(dtype, scale=torch.full((1,), 0.02, device="cuda"))]
    formats += [ActivationFormat(dtype, 128)] if shape[0] % 256 == 0 else []
    for rows, to in product((2, 16, 17, 33, 64, 65), formats):
        x, residual = (torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16) for _ in range(2))
        found, total = linear.apply_normed_quantized(x, residual, norm, Activation.SILU, to)
        expected, _ = UnfusedLinear.apply_normed_quantized(linear, x, residual, norm, Activation.SILU, to)
        assert torch.equal(total, x + residual)
        assert found.values.shape == expected.values.shape and found.scales.stride() == expected.scales.stride()
        assert error(found.dequantize(), expected.dequantize()) < 0.02, (rows, to)


@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 8192), (28672, 2560), (1024, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_act_order_equals_sorted_weights(
    dtype: torch.dtype, shape: tuple[int, int], activation: Activation | None
) -> None:
    inputs = shape[1]
    found = linear_of(SCHEMES["gptq_32"], *shape, dtype)
    usual = copy(found)
    assert isinstance(found, TritonInt4Linear) and isinstance(usual, TritonInt4Linear)
    order = found.order = torch.randperm(inputs, device="cuda").int()
    factors = torch.rand(2, inputs, device="cuda", dtype=dtype) + 0.5
    plain_norm, update_norm = (RMSNorm(weight, 1e-5, found.kernels) for weight in factors)
    for rows in (1, 2, 16, 64, 200):
        x, residual = torch.randn(2, rows, inputs, device="cuda", dtype=dtype).unbind(0)
        assert torch.equal(found.kernels.gather_columns(x, order), x[:, order])
        assert error(found.apply(x), usual.apply(x[:, order])) < 0.002, rows
        for norm, stream in (
            (plain_norm, None),
            (plain_norm, residual),
            (SandwichNorm(update_norm, plain_norm), residual),
        ):
            normed, expected_total = norm(x, stream)
            assert error(norm(x, stream, order)[0], normed[:, order]) < 0.002, rows
            y, total = found.apply_normed(x, stream, norm, activation)
            ordered = normed[:, order]
            expected = usual.apply(ordered) if activation is None else usual.apply_gated(ordered, activation)
            assert error(y, expected) < 0.012, rows
            assert error(total, expected_total) < 0.002, rows


def rounded_cases() -> list[tuple[str, tuple[int, int]]]:
    return [(name, shape) for name in ("fp8", "fp8_block", "fp8_static", "int8") for shape in MANY_SHAPES]


@pytest.mark.parametrize(("name", "shape"), rounded_cases())
def test_w8a8_matmuls_equal_their_oracle_in_the_library_and_in_triton(name: str, shape: tuple[int, int]) -> None:
    linear = linear_of(SCHEMES[name], *shape)
    assert isinstance(linear, TritonEightBitLinear)
    scale_rows = None if linear.scheme.block is None else SCALE_ROWS
    for rows in MANY_ROWS:
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        to = linear.input_format(rows)
        assert to is not None
        quantized = linear.kernels.quantize(x, to)
        expected = quantized_matmul(quantized, linear.values, linear.scales, linear.bias, scale_rows)
        assert error(linear.apply_quantized(quantized), expected) < 0.004, rows
        scaling = "output" if scale_rows is None else "block"
        plan = choose_w8a8_gemm(rows, *shape, linear.scheme.kind, scaling, linear.gpu)
        assert plan is not None
        space = linear.workspace.take(*plan.workspace(rows, shape[0]))
        assert space is not None
        for whole in {False, linear.wide_scales is not None}:
            given = (linear.values, linear.scales, linear.bias, plan, *space, whole, linear.gpu.pdl)
            assert error(w8a8_matmul(quantized, *given), expected) < 0.004, (rows, plan, whole)
        if linear.wide_scales is not None and shape[1] % 512 == 0:
            product = library_matmul(quantized, linear.values, linear.wide_scales, linear.bias)
            assert error(product, expected) < 0.004, rows


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_static", "int8"])
def test_quantization_in_a_norm_a_gate_and_alone_equals_a_separate_kernel(name: str) -> None:
    linear = linear_of(SCHEMES[name], 1024, 4096)
    kernels = linear.kernels
    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16) + 0.5
    for rows in (65, 257, 1000):
        to = linear.input_format(rows)
        assert to is not None
        x, residual = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        wide = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16)
        for found, expected in (
            (kernels.quantize(x, to), oracle.quantize(x, to)),
            (kernels.quantized_gate(wide, Activation.SILU, to), oracle.quantized_gate(wide, Activation.SILU, to)),
            *(
                (kernels.quantized_norm(x, stream, x_weight, weight, 1e-5, to)[0], oracle.quantize(normed, to))
                for stream, x_weight, normed in (
                    (None, None, kernels.rms_norm(x, weight, 1e-5, None)),
                    (residual, None, kernels.add_rms_norm(x, residual, weight, 1e-5, None)[0]),
                    (residual, weight, kernels.norm_add_rms_norm(x, weight, residual, weight, 1e-5, None)[0]),
                )
            ),
        ):
            # A different last bit of a division or sum moves a value to a neighboring quantized one.
            assert (found.values[:rows].float() == expected.values[:rows].float()).float().mean() > 0.98
            assert error(found.dequantize(), expected.dequantize()) < 0.01


def test_an_engine_with_fp8_weights_generates_like_16_bits() -> None:
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in ("What does textwrap.dedent do?", "How do I sort a list?")]
    params = [SamplingParams(40, temperature=0.0)] * len(prompts)
    said = {}
    for quantize in ("off", "fp8"):
        options = EngineOptions(device="cuda", quantize=quantize, max_rows=4, max_len=256, kv_tokens=2048)
        said[quantize] = DrivenEngine.build(options).generate(prompts, params)
    assert said["fp8"] == said["off"]


@pytest.mark.parametrize("name", ["--quantize fp8", "fp8_channel", "int8"])
def test_an_engine_with_fused_gate_and_quantization_generates_like_16_bits(name: str, tmp_path: Path) -> None:
    """The default model is too narrow for the rule, whose threshold is lowered."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in ("What does textwrap.dedent do?", "How do I sort a list?")]
    options = EngineOptions(device="cuda", max_rows=4, max_len=256, kv_tokens=2048)
    params = [SamplingParams(40, temperature=0.0)] * len(prompts)
    expected = DrivenEngine.build(options).generate(prompts, params)
    quantized = structs.replace(options, quantize="fp8")
    if name in LAYOUTS:
        plain_folder(tmp_path / "model")
        quantize_checkpoint(tmp_path / "model", LAYOUTS[name], fitted=True)
        quantized = structs.replace(options, model=str(tmp_path / "model"))
    with (
        patch.object(quantized_plans, "_MIN_SM_UTILIZATION", 0.0),
        patch.object(
            triton_eight_bit_linear, "gated_w8a8_gemm", wraps=triton_eight_bit_linear.gated_w8a8_gemm
        ) as gated,
        patch.object(attention_steps, "quantize_by_amax", wraps=attention_steps.quantize_by_amax) as rounded,
    ):
        said = DrivenEngine.build(quantized).generate(prompts, params)
    assert said == expected
    assert rounded.called
    assert gated.called == (name != "int8"), "the library multiplies the 704 inputs of `down`, but for integers"


def test_steps_with_prompts_from_graphs_have_the_bits_of_the_same_kernels_run_eagerly() -> None:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        quantize="fp8",
        pipeline="on",
        max_rows=12,
        max_step_tokens=128,
        max_len=256,
        kv_tokens=4096,
        prefill_chunk=96,
        graph_rows="1,2,4,8,12",
    )
    driven = DrivenEngine.build(options)
    runtime = runtime_of(driven)
    forward = CudaForward(runtime.model, runtime.kv, runtime.tables, runtime.page_tables, read_gpu_traits())
    launch, equal, sizes = runtime.launch, list[Tensor](), set[int]()

    def on_launch(slot: int, plan: StepPlan) -> None:
        launch(slot, plan)
        assert runtime.graphs is not None
        bucket = runtime.graphs.bucket(plan)
        if bucket is not None and bucket.num_prefill_tokens:
            equal.extend(repeat_mixed(runtime, forward, slot, bucket))
            sizes.add(sum(bucket))

    with patch.object(runtime, "launch", on_launch):
        drive(driven, requests(20, KINDS, Random(1), longest=90, most=40, vocab=4096), Random(2))
    print(f"\n{len(equal)} comparisons, of steps of {sorted(sizes)} positions")
    assert len(equal) > 20 and max(sizes) > 64, "some products are of decoded weights, some of bytes with bytes"
    assert all(same.item() for same in equal)
