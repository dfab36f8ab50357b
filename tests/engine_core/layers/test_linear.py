"""Unquantized linear weights: their matmul, their slots, and the choice between them."""

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.reference import layer as reference
from tandem.engine_core.layers.build_context import LinearMethod
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.norm import RMSNorm
from tandem.engine_core.layers.torch_linear import CpuMethod, TorchLinear, TorchMethod

CPU = torch.device("cpu")


def filled(method: LinearMethod, bias: bool) -> TorchLinear:
    torch.manual_seed(0)
    linear = method.build(200, 96, bias, torch_build_context(CPU, torch.float32))
    assert isinstance(linear, TorchLinear)
    linear.weight.copy_(torch.randn(200, 96))
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [TorchMethod(), CpuMethod()])
def test_apply_is_a_matmul(method: LinearMethod, bias: bool) -> None:
    linear = filled(method, bias)
    assert linear.weight.shape == (200, 96)
    x = torch.randn(37, 96)
    expected = x.double() @ linear.weight.double().t()
    if linear.bias is not None:
        expected += linear.bias.double()
    for rows in (0, 1, 2, 3, 4, 5, 37):
        torch.testing.assert_close(linear.apply(x[:rows]).double(), expected[:rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [TorchMethod(), CpuMethod()])
def test_apply_writes_to_the_given_output(method: LinearMethod, bias: bool) -> None:
    linear, x = filled(method, bias), torch.randn(37, 96)
    for rows in (1, 3, 37):
        space = torch.full((40, 200), torch.nan)
        out = linear.apply(x[:rows], space[:rows])
        assert out.data_ptr() == space.data_ptr()
        torch.testing.assert_close(space[:rows], linear.apply(x[:rows]))
        assert space[rows:].isnan().all()


def test_few_rows_round_like_many_on_the_cpu() -> None:
    linear = filled(torch_build_context(CPU, torch.float32).method_for(None), False)
    x = torch.randn(4, 96)
    four = linear.apply(x)
    for rows in (1, 2, 3):
        assert torch.equal(linear.apply(x[:rows]), four[:rows])


@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize("residual", [None, torch.randn(5, 96)])
def test_apply_normed_equals_norm_matmul_and_activation(
    residual: torch.Tensor | None, activation: Activation | None
) -> None:
    linear = filled(CpuMethod(), True)
    norm = RMSNorm(torch.rand(96) + 0.5, 1e-5, torch_build_context(CPU, torch.float32).kernels)
    x = torch.randn(5, 96)
    expected_stream = x if residual is None else x + residual
    product = linear.apply(reference.rms_norm(expected_stream, norm.weight, 1e-5))
    y, stream = linear.apply_normed(x, residual, norm, activation)
    assert torch.equal(stream, expected_stream)
    assert torch.equal(y, product if activation is None else reference.gated_activation(product, activation))


def test_slots_of_a_fused_projection_are_its_parts_and_the_whole() -> None:
    found = filled(CpuMethod(), True).slots("a.", "qkv", {"q": 120, "k": 80})
    assert [slot.name for slot in found] == [
        *("a.q.weight", "a.k.weight", "a.qkv.weight"),
        *("a.q.bias", "a.k.bias", "a.qkv.bias"),
    ]
    slots = {slot.name: slot for slot in found}
    shapes = [slots[f"a.{name}.weight"].accepted_shapes for name in ("q", "k", "qkv")]
    assert shapes == [((120, 96),), ((80, 96),), ((200, 96),)]
    slots["a.k.bias"].target.fill_(3)
    assert (slots["a.qkv.bias"].target[120:] == 3).all()
    assert (slots["a.q.bias"].target != 3).all()


def test_default_method_follows_the_device() -> None:
    assert isinstance(torch_build_context(torch.device("cuda"), torch.float32).method_for(None), TorchMethod)
