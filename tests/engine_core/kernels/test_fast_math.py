"""Elementary functions stay within their error bounds, including at critical values.

The interpreter runs Triton's own functions instead; on a GPU these tests check the instructions.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine_core.kernels.fast_math import fast_div, fast_exp2, fast_log2, ge_float32, int8_to_float32, to_float32

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BOUND = 2.0**-22


@triton.jit
def _unary_kernel(x_ptr, out_ptr, IS_LOG: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, fast_log2(x) if IS_LOG else fast_exp2(x))


def unary(x: Tensor, *, is_log: bool) -> Tensor:
    out = torch.full_like(x, torch.nan)
    _unary_kernel[(1,)](x, out, IS_LOG=is_log, BLOCK=len(x))
    return out.double()


def test_logarithms_are_right_to_their_bound(device: str) -> None:
    """Absolute between 0.5 and 2, relative elsewhere, from the smallest normal number to the largest."""
    near = torch.linspace(0.5, 2.0, 2048)
    far = torch.exp2(torch.linspace(-125.9, 127.9, 2048))
    x = torch.cat([near, far]).to(device)
    exact = x.double().log2()
    error = (unary(x, is_log=True) - exact).abs()
    inside = (x >= 0.5) & (x <= 2.0)
    assert (error <= torch.where(inside, BOUND, BOUND * exact.abs())).all()


def test_powers_of_two_are_right_to_their_bound(device: str) -> None:
    """Including integers; -inf gives 0, and subnormal results are 0 or nearly so."""
    x = torch.cat([torch.linspace(-125.9, 127.9, 4096 - 256), torch.arange(-126.0, 128.0), torch.zeros(2)]).to(device)
    x[-1] = -torch.inf
    found, exact = unary(x, is_log=False), x.double().exp2()
    assert ((found - exact).abs() <= BOUND * exact).all()
    assert found[-2:].tolist() == [1.0, 0.0]
    small = unary(torch.tensor([-126.5, -140.0, -200.0, -3e38], device=device), is_log=False)
    assert ((small >= 0) & (small < 2.0**-126)).all()
    assert small[2:].tolist() == [0.0, 0.0]


@triton.jit
def _widened_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, to_float32(tl.load(x_ptr + offsets)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 64, 4096])
def test_16_bit_floats_are_converted_exactly(dtype: torch.dtype, count: int, device: str) -> None:
    """Including infinities, both zeros and subnormals; NaN stays NaN."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
    x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, torch.finfo(dtype).max, 2.0**-20], dtype=dtype)
    x = x.flip(0)[-count:].to(device)
    out = torch.zeros(count, device=device)
    _widened_kernel[(1,)](x, out, BLOCK=count)
    same = out.view(torch.int32) == x.float().view(torch.int32)
    assert (same | (x.isnan() & out.isnan())).all()


@triton.jit
def _bytes_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, int8_to_float32(tl.load(x_ptr + offsets)))


def test_every_int8_is_converted_exactly(device: str) -> None:
    stored = torch.arange(-128, 128, device=device).to(torch.int8).repeat(2)
    out = torch.full((512,), torch.nan, device=device)
    _bytes_kernel[(1,)](stored, out, BLOCK=512)
    assert torch.equal(out, stored.float())


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, IS_QUOTIENT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    y = tl.load(y_ptr + tl.program_id(0))
    tl.store(out_ptr + offsets, fast_div(x, y) if IS_QUOTIENT else ge_float32(x, y))


def binary(x: Tensor, y: Tensor, *, is_quotient: bool) -> Tensor:
    """Return the result for each pair, [len(y), len(x)]."""
    out = torch.full((len(y), len(x)), torch.nan, device=x.device)
    _binary_kernel[(len(y),)](x, y, out, IS_QUOTIENT=is_quotient, BLOCK=len(x))
    return out


def test_comparisons_are_ones_and_zeros(device: str) -> None:
    """NaN compares false, the zeros are equal, and adjacent floats differ."""
    x = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 1.0, 1.0 + 2**-23, torch.inf, torch.nan], device=device)
    assert torch.equal(binary(x, x, is_quotient=False), (x >= x[:, None]).float())


def test_quotients_are_rounded_correctly_but_for_the_last_bit_of_a_few(device: str) -> None:
    """By penalties from the smallest to the largest allowed; large and infinite values are unchanged."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(device) * 30
    x[:5] = torch.tensor([0.0, 3e38, torch.inf, 1e30, 5.0])
    y = torch.tensor([1e-6, 0.7, 1.0, 1.1, 1.3, 3.0, 10.0], device=device)
    found, exact = binary(x, y, is_quotient=True), (x.double() / y.double()[:, None]).float()
    assert torch.equal(found[2], x)
    finite = exact.isfinite()
    assert torch.equal(found[~finite], exact[~finite])
    assert ((found - exact).abs()[finite] <= 2**-22 * exact.abs()[finite]).all()
    usual = finite & (exact.abs() < 1e29)
    assert (found != exact)[usual].sum() <= 3
    assert torch.equal(binary(x, torch.tensor([2.0**-149], device=device), is_quotient=True)[0, 1:3], x[[2, 2]])
