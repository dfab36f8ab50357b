"""Linear layers by name: the scheme of each, and fused projections with different schemes."""

import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference import layer as reference
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.split_linear import SplitLinear
from tandem.engine_core.layers.torch_linear import TorchLinear
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.quantization.module_names import ModuleNames
from tandem.engine_core.quantization.quantization import excluding
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme

FP8 = EightBitScheme("fp8", Activations.TOKEN)
PARTS = {"q_proj": 24, "k_proj": 16, "v_proj": 16}


def context_of(*plain: str) -> BuildContext:
    """Return a context in which all linear layers but some are FP8."""
    quantization = excluding(FP8, ModuleNames.exactly(plain))
    return torch_build_context(torch.device("cpu"), torch.float32, quantization)


def filled(linear: LinearWeights) -> LinearWeights:
    class Slotted:
        def weight_slots(self) -> list[WeightSlot]:
            return linear.slots("a.", "qkv_proj", PARTS)

    fill_with_noise(Slotted())
    return linear


def test_each_module_gets_its_own_scheme() -> None:
    context = context_of("a.o_proj")
    assert isinstance(context.linear("a.o_proj", 16, 16), TorchLinear)
    assert isinstance(context.linear("b.o_proj", 16, 16), EightBitLinear)
    assert context.method_for(FP8) is context.method_for(FP8)


def test_parts_of_one_scheme_are_merged() -> None:
    linear = context_of("b.qkv_proj").linear("a.qkv_proj", 56, 32, parts=PARTS)
    assert isinstance(linear, EightBitLinear)
    assert linear.values.shape == (56, 32)
    plain = context_of(*(f"a.{part}" for part in PARTS)).linear("a.qkv_proj", 56, 32, parts=PARTS)
    assert isinstance(plain, TorchLinear)


def test_parts_of_different_schemes_run_one_by_one() -> None:
    linear = filled(context_of("a.v_proj").linear("a.qkv_proj", 56, 32, bias=True, parts=PARTS))
    assert isinstance(linear, SplitLinear)
    (names, both), (others, value) = linear.linears
    assert (names, others) == ({"q_proj": 24, "k_proj": 16}, {"v_proj": 16})
    assert isinstance(both, EightBitLinear) and isinstance(value, TorchLinear)
    x = torch.randn(5, 32)
    expected = torch.cat((both.apply(x), value.apply(x)), dim=1)
    assert torch.equal(linear.apply(x), expected)
    out = torch.empty(5, 56)
    assert linear.apply(x, out) is out and torch.equal(out, expected)
    slots = [slot.name for slot in linear.slots("a.", "qkv_proj", PARTS)]
    assert slots[:3] == ["a.q_proj.weight", "a.q_proj.weight_scale", "a.q_proj.weight_scale_inv"]
    assert not any("qkv_proj" in name for name in slots)


def test_parts_that_are_not_consecutive_are_not_merged() -> None:
    linear = context_of("a.k_proj").linear("a.qkv_proj", 56, 32, parts=PARTS)
    assert isinstance(linear, SplitLinear)
    assert [list(names) for names, _ in linear.linears] == [["q_proj"], ["k_proj"], ["v_proj"]]


def test_a_split_gate_normalizes_once_and_activates() -> None:
    context = context_of("a.up_proj")
    linear = context.linear("a.gate_up_proj", 64, 32, parts={"gate_proj": 32, "up_proj": 32})
    assert isinstance(linear, SplitLinear)

    class Slotted:
        def weight_slots(self) -> list[WeightSlot]:
            return linear.slots("a.", "gate_up_proj", {"gate_proj": 32, "up_proj": 32})

    fill_with_noise(Slotted())
    norm = RMSNorm(torch.rand(32) + 0.5, 1e-5, context.kernels)
    x, residual = torch.randn(3, 32), torch.randn(3, 32)
    y, stream = linear.apply_normed(x, residual, norm, Activation.SILU)
    normed = reference.rms_norm(x + residual, norm.weight, 1e-5)
    assert torch.equal(stream, x + residual)
    assert torch.equal(y, reference.gated_activation(linear.apply(normed), Activation.SILU))
    to = ActivationFormat(torch.float8_e4m3fn)
    rows, _ = linear.apply_normed_quantized(x, residual, norm, Activation.SILU, to)
    torch.testing.assert_close(rows.dequantize(), y, atol=0.1, rtol=0.1)
