import pytest
import torch

from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.layers.build_context import BuildContext, torch_build_context
from tandem.engine_core.layers.linear import Linear
from tandem.engine_core.layers.linear_method import CpuMethod, LinearMethod, PlainMethod

CPU = torch.device("cpu")


def filled(method: LinearMethod, bias: bool) -> Linear:
    torch.manual_seed(0)
    linear = Linear.build(200, 96, bias, BuildContext(CPU, torch.float32, method, torch_kernels()))
    linear.weight.copy_(torch.randn(200, 96))
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [PlainMethod(torch_kernels()), CpuMethod(torch_kernels())])
def test_is_a_product(method: LinearMethod, bias: bool) -> None:
    linear = filled(method, bias)
    assert linear.weight.shape == (200, 96)
    x = torch.randn(37, 96)
    expected = x.double() @ linear.weight.double().t()
    if linear.bias is not None:
        expected += linear.bias.double()
    for rows in (0, 1, 2, 3, 4, 5, 37):
        torch.testing.assert_close(linear(x[:rows]).double(), expected[:rows], atol=1e-4, rtol=0)


def test_few_rows_round_as_many_do_on_the_cpu() -> None:
    linear = filled(torch_build_context(CPU, torch.float32).method, False)
    x = torch.randn(4, 96)
    four = linear(x)
    for rows in (1, 2, 3):
        assert torch.equal(linear(x[:rows]), four[:rows])


def test_slots_of_a_fused_projection() -> None:
    slots = filled(CpuMethod(torch_kernels()), True).slots("a.", "qkv", {"q": 120, "k": 80})
    assert list(slots) == ["a.q.weight", "a.k.weight", "a.qkv.weight", "a.q.bias", "a.k.bias", "a.qkv.bias"]
    assert [slots[f"a.{name}.weight"].shape for name in ("q", "k", "qkv")] == [(120, 96), (80, 96), (200, 96)]
    slots["a.k.bias"].target.fill_(3)
    assert (slots["a.qkv.bias"].target[120:] == 3).all()
    assert (slots["a.q.bias"].target != 3).all()


def test_default_method_follows_the_device() -> None:
    assert isinstance(torch_build_context(torch.device("cuda"), torch.float32).method, PlainMethod)
