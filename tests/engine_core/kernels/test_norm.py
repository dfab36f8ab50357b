"""The Triton norms against their oracle, in float32."""

import pytest
import torch

from tandem.engine_core.kernels.norm import add_rms_norm, norm_add_rms_norm, rms_norm
from tandem.engine_core.kernels.reference import layer as reference


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 48), (2, 300)])
def test_rms_norm_equals_its_oracle(tokens: int, hidden: int, device: str) -> None:
    x, weight = torch.randn(tokens, hidden, device=device) * 3, torch.rand(hidden, device=device) + 0.5
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_rms_norm_takes_strided_rows(device: str) -> None:
    x, weight = torch.randn(3, 96, device=device)[:, :40], torch.rand(40, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_rms_norm_of_zeros_is_zero(device: str) -> None:
    assert not rms_norm(torch.zeros(2, 8, device=device), torch.ones(8, device=device), 1e-6).any()


def test_add_rms_norm_equals_its_oracle_and_keeps_its_input(device: str) -> None:
    x, residual, weight = (torch.randn(*shape, device=device) for shape in ((3, 80), (3, 80), (80,)))
    kept = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected, stream = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, stream)
    assert torch.equal(residual, kept)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 300)])
def test_norm_add_rms_norm_equals_its_oracle(tokens: int, hidden: int, device: str) -> None:
    x, residual = torch.randn(2, tokens, hidden, device=device).unbind(0)
    x_weight, weight = torch.rand(2, hidden, device=device).unbind(0)
    normed, total = norm_add_rms_norm(x * 9, x_weight, residual, weight, 1e-6)
    expected, stream = reference.norm_add_rms_norm(x * 9, x_weight, residual, weight, 1e-6)
    torch.testing.assert_close(total, stream, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)


def test_rms_norm_takes_no_rows(device: str) -> None:
    assert rms_norm(torch.empty(0, 16, device=device), torch.ones(16, device=device), 1e-6).shape == (0, 16)


def test_rms_norm_refuses_wide_and_scattered_rows(device: str) -> None:
    wide = torch.empty(1, 16385, device=device)
    with pytest.raises(ValueError, match="16384"):
        rms_norm(wide, wide[0], 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.empty(8, 4, device=device).T, torch.empty(8, device=device), 1e-6)


def test_rms_norm_takes_a_float32_weight_with_half_precision_rows(device: str) -> None:
    x, weight = torch.randn(3, 80, device=device).half(), torch.rand(80, device=device) + 0.5
    normed = rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.float16
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(normed, expected, atol=1e-6, rtol=2**-10)
    # Rounding twice would change more than a tenth of them.
    assert (normed == expected).float().mean() > 0.98


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 300)])
def test_an_order_moves_the_columns_of_the_norm_alone(tokens: int, hidden: int, device: str) -> None:
    x, residual = torch.randn(2, tokens, hidden, device=device).unbind(0)
    x_weight, weight = torch.rand(2, hidden, device=device).unbind(0)
    order = torch.randperm(hidden, device=device).int()
    expected = reference.rms_norm(x, weight, 1e-6)[:, order]
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, order), expected, atol=1e-5, rtol=1e-5)
    for norm, oracle, given in (
        (add_rms_norm, reference.add_rms_norm, (x, residual)),
        (norm_add_rms_norm, reference.norm_add_rms_norm, (x, x_weight, residual)),
    ):
        found, total = norm(*given, weight, 1e-6, order)
        expected, stream = oracle(*given, weight, 1e-6)
        torch.testing.assert_close(found, expected[:, order], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(total, stream, atol=1e-5, rtol=1e-5)
