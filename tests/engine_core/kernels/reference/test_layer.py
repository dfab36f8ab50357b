"""The layer oracles against the same formulas in float64."""

import pytest
import torch

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.reference.layer import (
    add_rms_norm,
    gated_activation,
    gather_columns,
    norm_add_rms_norm,
    rms_norm,
    rope,
    rope_and_kv_write,
    soft_cap,
)


def tables(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return angles, and the cosines and signed sines of the kernels."""
    angles = torch.rand(tokens, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return angles, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm_equals_the_formula(rows: int) -> None:
    x, weight = torch.randn(rows, 48) * 3, torch.rand(48) + 0.5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=0)


def test_rms_norm_rounds_before_the_weight_as_transformers_does() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, atol=0, rtol=2**-7)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_add_rms_norm_returns_the_stream_too() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    normed, stream = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    angles, cos, sin = tables(6, 10)
    x = torch.randn(6, 3, 10)
    first, second = x[..., :5].double(), x[..., 5:].double()
    rotated = torch.complex(first, second) * torch.polar(torch.ones(6, 1, 5).double(), angles[:, None].double())
    expected = torch.cat((rotated.real, rotated.imag), -1)
    torch.testing.assert_close(rope(x, cos, sin).double(), expected, atol=1e-5, rtol=0)


def test_rope_rotates_the_first_elements_of_a_head_and_passes_the_rest() -> None:
    _, cos, sin = tables(6, 10)
    x = torch.randn(6, 3, 16)
    found = rope(x, cos, sin)
    torch.testing.assert_close(found[..., :10], rope(x[..., :10], cos, sin), atol=0, rtol=0)
    assert torch.equal(found[..., 10:], x[..., 10:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_kv_write_touches_its_slots_only(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 4, 2, 8
    _, cos, sin = tables(3, head_dim)
    qkv = torch.randn(3, heads + 2 * kv_heads, head_dim).to(dtype)
    keys, values = torch.full((2, 12, kv_heads, head_dim), 7.0, dtype=dtype).unbind(0)
    index = torch.tensor([9, 2, 5])
    query = rope_and_kv_write(qkv, cos, sin, index, keys, values)
    assert query.dtype == dtype
    assert torch.equal(query, rope(qkv[:, :4], cos, sin))
    assert torch.equal(keys[index], rope(qkv[:, 4:6], cos, sin))
    assert torch.equal(values[index], qkv[:, 6:])
    others = [slot for slot in range(12) if slot not in (9, 2, 5)]
    assert (keys[others] == 7).all()
    assert (values[others] == 7).all()


def test_gated_activation_with_silu_equals_the_formula() -> None:
    gate, up = torch.randn(2, 4, 24).unbind(0)
    wide = gate.double()
    expected = wide / (1 + (-wide).exp()) * up.double()
    product = gated_activation(torch.cat((gate, up), -1), Activation.SILU)
    torch.testing.assert_close(product.double(), expected, atol=1e-6, rtol=0)


def test_gated_activation_with_gelu_equals_the_tanh_formula() -> None:
    gate, up = torch.randn(2, 4, 24).unbind(0)
    wide = gate.double()
    expected = wide / 2 * (1 + ((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)).tanh()) * up.double()
    product = gated_activation(torch.cat((gate, up), -1), Activation.GELU_TANH)
    torch.testing.assert_close(product.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_with_a_float32_weight_rounds_once_as_the_gemma_of_transformers_does(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    reference = Gemma3RMSNorm(64, eps=1e-6)
    x, stored = torch.randn(50, 64).to(dtype), torch.randn(64).to(dtype)
    reference.weight.data = stored
    found = rms_norm(x, stored.float() + 1, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference(x), atol=1e-6, rtol=0 if dtype.itemsize == 2 else 1e-6)


def test_an_order_moves_the_columns_of_the_norm_and_leaves_the_stream() -> None:
    x, residual = torch.randn(2, 3, 16).unbind(0)
    x_weight, weight = torch.rand(2, 16).unbind(0)
    order = torch.arange(15, -1, -1, dtype=torch.int32)
    assert torch.equal(gather_columns(x, order), x.flip(1))
    assert torch.equal(rms_norm(x, weight, 1e-5, order), rms_norm(x, weight, 1e-5).flip(1))
    for norm, given in ((add_rms_norm, (x, residual)), (norm_add_rms_norm, (x, x_weight, residual))):
        (found, total), (expected, stream) = norm(*given, weight, 1e-5, order), norm(*given, weight, 1e-5)
        assert torch.equal(found, expected.flip(1))
        assert torch.equal(total, stream)


def test_norm_add_rms_norm_normalises_the_update_before_it_is_added() -> None:
    x, residual = torch.randn(2, 3, 16).bfloat16().unbind(0)
    update_weight, weight = torch.rand(2, 16).unbind(0)
    normed, stream = norm_add_rms_norm(x, update_weight, residual, weight, 1e-5)
    assert torch.equal(stream, rms_norm(x, update_weight, 1e-5) + residual)
    assert torch.equal(normed, rms_norm(stream, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap_is_in_place_with_the_operations_of_transformers(dtype: torch.dtype) -> None:
    logits = torch.linspace(-400, 400, 801).to(dtype)
    expected = torch.tanh(logits / 30.0) * 30.0
    assert soft_cap(logits, 30.0) is logits
    assert torch.equal(logits, expected)
