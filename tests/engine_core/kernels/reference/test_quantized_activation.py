"""The oracle of W8A8 matmuls, against arithmetic on dequantized values."""

import pytest
import torch

from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_matmul

FP8 = torch.float8_e4m3fn


def test_a_scale_maps_the_amax_of_a_row_or_group_to_the_largest_value() -> None:
    """A row of zeros stays zero, and values out of range of a static scale are clamped."""
    x = torch.tensor([[1.0, -4.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    rows = quantize(x, ActivationFormat(torch.int8))
    assert rows.values.tolist() == [[32, -127, 64, 16], [0, 0, 0, 0]], "halves round to even: 31.75, 63.5, 15.875"
    assert rows.scales[0].item() == pytest.approx(4 / 127)
    grouped = quantize(x, ActivationFormat(FP8, 2))
    assert grouped.values.float()[:2].tolist() == [[112, -448, 448, 112], [0, 0, 0, 0]]
    torch.testing.assert_close(grouped.dequantize(), x)
    known = quantize(x, ActivationFormat(torch.int8, scale=torch.tensor([0.02])))
    assert known.values[0].tolist() == [50, -127, 100, 25]


@pytest.mark.parametrize("scale_rows", [None, 128])
def test_quantized_matmul_applies_each_block_scale(scale_rows: int | None) -> None:
    """The last blocks of outputs and inputs are not full; the bias is added before the sum is rounded."""
    torch.manual_seed(2)
    outputs, inputs, rows = 130, 200, 3
    values = torch.randint(-8, 8, (outputs, inputs)).to(FP8)
    scales = torch.rand(outputs) if scale_rows is None else torch.rand(2, 2)
    given = QuantizedActivation(
        torch.randint(-9, 9, (rows, inputs)).to(torch.int8), torch.rand(rows, 1), rows, torch.bfloat16
    )
    bias = torch.randn(outputs)
    found = quantized_matmul(given, values, scales, bias, scale_rows)
    expected = torch.zeros(rows, outputs, dtype=torch.float64)
    for output in range(outputs):
        for first in range(0, inputs, 128):
            block = slice(first, first + 128)
            scale = scales[output] if scale_rows is None else scales[output // 128, first // 128]
            numbers = given.values[:, block].double() * given.scales.double()
            expected[:, output] += numbers @ values[output, block].double() * scale.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected + bias.double(), atol=1e-3, rtol=2**-8)
