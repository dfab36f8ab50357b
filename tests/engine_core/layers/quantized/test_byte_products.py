"""Products of bytes with bytes, against the numbers that the bytes stand for."""

import pytest
import torch

from tandem.engine_core.layers.quantized.byte_products import byte_product, rounded_rows

DTYPES = (torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_equals_that_of_the_rounded_inputs(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 64, generator=generator).bfloat16()
    values, scales = rounded_rows(torch.randn(48, 64, generator=generator), dtype)
    bias = torch.arange(48.0).bfloat16() if with_bias else None
    rows, row_scales = rounded_rows(x, dtype)
    expected = (rows.float() * row_scales) @ (values.float() * scales).t() + (0 if bias is None else bias.float())
    found = byte_product(x, values, scales[:, 0], bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_by_their_own_scale_and_zeros_stay(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e-30, -1e-30], [3e4, 1.0], [0.0, 0.0], [-7.0, 3.5]])
    values, scales = rounded_rows(x, dtype)
    assert values.float().isfinite().all()
    error = (values.float() * scales - x).abs()
    assert (error <= x.abs().amax(1, keepdim=True) / (250 if dtype == torch.int8 else 2**7)).all()
    assert (values[2].float() == 0).all()
