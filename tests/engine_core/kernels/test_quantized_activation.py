"""Dequantization of activations, and layout of uninitialized ones."""

import pytest
import torch

from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)

CPU = torch.device("cpu")


def test_dequantize_multiplies_by_the_scale_of_row_group_or_tensor() -> None:
    """Padding of rows with group scales is ignored."""
    values = torch.tensor([[1, 2, 3, 4], [-5, 6, 7, -8], [9, 9, 9, 9]], dtype=torch.int8)
    by_row = QuantizedActivation(values[:2], torch.tensor([[2.0], [0.5]]), 2, torch.float32)
    assert by_row.dequantize().tolist() == [[2, 4, 6, 8], [-2.5, 3, 3.5, -4]]
    scales = torch.tensor([[2.0, 10.0], [0.5, 1.0], [torch.nan, torch.nan]])
    by_group = QuantizedActivation(values, scales, 2, torch.float32)
    assert by_group.dequantize().tolist() == [[2, 4, 30, 40], [-2.5, 3, 7, -8]]
    assert QuantizedActivation(values[:1], torch.tensor([3.0]), 1, torch.float32).dequantize().tolist() == [
        [3, 6, 9, 12]
    ]


@pytest.mark.parametrize(("count", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_rows_with_groups_are_padded_to_four_and_their_scales_lie_together(count: int, padded: int) -> None:
    rows = empty_quantized_activation(count, 256, torch.bfloat16, ActivationFormat(torch.float8_e4m3fn, 128), CPU)
    assert (rows.values.shape, rows.scales.shape, rows.count) == ((padded, 256), (padded, 2), count)
    assert rows.scales.stride() == (1, max(1, padded))
    plain = empty_quantized_activation(count, 256, torch.bfloat16, ActivationFormat(torch.int8), CPU)
    assert (plain.values.shape, plain.scales.shape) == ((count, 256), (count, 1))


def test_a_known_scale_is_kept_and_uneven_groups_are_refused() -> None:
    scale = torch.tensor([0.25])
    assert (
        empty_quantized_activation(3, 8, torch.float16, ActivationFormat(torch.int8, scale=scale), CPU).scales is scale
    )
    with pytest.raises(ValueError, match=r"^200 inputs\b.*\b128$"):
        empty_quantized_activation(3, 200, torch.float16, ActivationFormat(torch.float8_e4m3fn, 128), CPU)


def test_formats_have_the_largest_value_of_their_dtype() -> None:
    assert (ActivationFormat(torch.int8).top, ActivationFormat(torch.float8_e4m3fn).top) == (127.0, 448.0)
    assert torch.tensor(448.0).to(torch.float8_e4m3fn).float() == 448.0
    assert torch.finfo(torch.float8_e4m3fn).max == 448.0
