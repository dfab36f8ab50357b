"""Int4 weights with act-order equal the same weights, sorted, with presorted inputs."""

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.norm import RMSNorm, SandwichNorm
from tandem.engine_core.layers.quantized.int4_linear import Int4Linear
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Int4Scheme

INPUTS, OUTPUTS, GROUP = 96, 48, 32
CONTEXT = torch_build_context(
    torch.device("cpu"), torch.float32, Quantization(Int4Scheme("gptq", GROUP, False, ordered=True))
)


def loaded(ordered: bool) -> tuple[Int4Linear, torch.Tensor]:
    """Weights as loaded, with shuffled groups or not, and the order of their sorted inputs."""
    generator = torch.Generator().manual_seed(1)
    linear = CONTEXT.linear("proj", OUTPUTS, INPUTS, True)
    assert isinstance(linear, Int4Linear) and linear.bias is not None
    levels = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=generator, dtype=torch.uint8)
    groups = (torch.arange(INPUTS) // GROUP)[torch.randperm(INPUTS, generator=generator)].int()
    order = groups.argsort(stable=True)
    linear.words.copy_(pack(levels if ordered else levels[:, order]))
    linear.scales.copy_(torch.rand(linear.scales.shape, generator=generator))
    linear.zeros.copy_(torch.randint(0, 16, linear.zeros.shape, generator=generator, dtype=torch.uint8))
    linear.bias.copy_(torch.rand(OUTPUTS, generator=generator))
    linear.sort((groups if ordered else groups[order])[None], "a map")
    return linear, order


def test_an_order_is_kept_in_four_bytes_a_column_and_sorts_the_weights() -> None:
    (found, order), (usual, _) = loaded(True), loaded(False)
    assert usual.order is None
    assert found.order is not None and found.order.dtype == torch.int32
    assert torch.equal(found.order, order.int())
    assert torch.equal(unpack(found.words), unpack(usual.words))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_matmuls_equal_those_of_sorted_weights(rows: int) -> None:
    (found, order), (usual, _) = loaded(True), loaded(False)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2))
    out = torch.empty(rows, OUTPUTS)
    assert torch.equal(found.apply(x), usual.apply(x[:, order]))
    assert found.apply(x, out) is out
    assert torch.equal(out, usual.apply(x[:, order]))
    assert torch.equal(found.apply_gated(x, Activation.SILU), usual.apply_gated(x[:, order], Activation.SILU))


@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("rows", [1, 7])
def test_matmuls_after_norms_equal_those_of_sorted_weights(rows: int, activation: Activation | None) -> None:
    (found, order), (usual, _) = loaded(True), loaded(False)
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, rows, INPUTS, generator=generator).unbind(0)
    plain, after = (RMSNorm(torch.rand(INPUTS, generator=generator), 1e-5, CONTEXT.kernels) for _ in range(2))
    for norm, stream in ((plain, None), (plain, residual), (SandwichNorm(after, plain), residual)):
        normed, expected_total = norm(x, stream)
        y, total = found.apply_normed(x, stream, norm, activation)
        sorted_inputs = normed[:, order]
        expected = usual.apply(sorted_inputs) if activation is None else usual.apply_gated(sorted_inputs, activation)
        assert torch.equal(y, expected)
        assert torch.equal(total, expected_total)
