"""W8A8 matmuls of a library, against their oracle."""

import pytest
import torch

from tandem.engine_core.kernels.quantized_activation import ActivationFormat
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_matmul
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import library_matmul

DTYPES = (torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_the_gemm_equals_its_oracle(
    dtype: torch.dtype, with_bias: bool, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU without VNNI, torch's own saturates in between.
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 64, generator=generator).bfloat16()
    weight = quantize(torch.randn(48, 64, generator=generator), ActivationFormat(dtype))
    scales = weight.scales[:, 0]
    bias = torch.arange(48.0).bfloat16() if with_bias else None
    rows = quantize(x, ActivationFormat(dtype, scale=torch.full((1,), 0.02) if static else None))
    for known in (scales, scales[:1]) if static and dtype != torch.int8 else (scales,):
        found = library_matmul(rows, weight.values, known, bias)
        assert found.dtype == torch.bfloat16
        expected = quantized_matmul(rows, weight.values, known.expand(48), bias)
        torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.01)
