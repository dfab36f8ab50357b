"""Quantization of keys and values to 8-bit floats, and dequantization."""

import pytest
import torch

from tandem.engine_core.kernels.kv_dtype import LARGEST, read_pool, to_pool, write_pool

FP8 = torch.float8_e4m3fn
ALL = torch.arange(256, dtype=torch.uint8).view(FP8).float()


def test_rounding_stays_within_its_bound() -> None:
    x = torch.cat((torch.randn(20_000) * 10 ** torch.linspace(-4, 2, 20_000), torch.linspace(-448, 448, 9_999)))
    error = (to_pool(x, FP8).float() - x).abs()
    assert (error <= torch.where(x.abs() < 2.0**-6, torch.tensor(2.0**-10), x.abs() / 16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_8_bit_float_is_read_back_exactly(dtype: torch.dtype) -> None:
    numbers = ALL[ALL.isfinite()]
    pool = torch.zeros(len(numbers), 1, dtype=FP8)
    index = torch.randperm(len(numbers))
    write_pool(pool, index, numbers.to(dtype).unsqueeze(1))
    back = read_pool(pool, index, dtype)
    assert back.dtype == dtype
    assert torch.equal(back.float().squeeze(1), numbers)


def test_values_out_of_range_are_clamped() -> None:
    stored = to_pool(torch.tensor([LARGEST, 464.0, 465.0, 1e30, -1e30, torch.inf]), FP8).float()
    assert stored.tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, 448.0]


def test_a_scale_brings_values_of_any_size_into_range() -> None:
    x = torch.randn(1000) * 1e5
    scale = x.abs().max() / LARGEST
    back = to_pool(x, FP8, scale).float() * scale
    assert ((back - x).abs() <= x.abs() / 16 + 2.0**-10 * scale).all()
    assert (to_pool(x, FP8).float().abs() == LARGEST).float().mean() > 0.9, "without one they are clamped"


def test_a_pool_of_another_dtype_keeps_values_unchanged() -> None:
    pool, x = torch.zeros(4, 2), torch.tensor([[1e30, 2.0]])
    write_pool(pool, torch.tensor([3]), x)
    assert torch.equal(read_pool(pool, torch.tensor([3, 0]), torch.float32), torch.cat((x, torch.zeros(1, 2))))
