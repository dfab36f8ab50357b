"""The Triton soft cap against its oracle."""

import pytest
import torch

from tandem.engine_core.kernels.reference import layer as reference
from tandem.engine_core.kernels.soft_cap import soft_cap


@pytest.mark.parametrize(("rows", "vocab"), [(1, 40), (3, 3001)])
def test_soft_cap_equals_its_oracle_in_place(rows: int, vocab: int, device: str) -> None:
    logits = torch.randn(rows, vocab, device=device) * 60
    expected = reference.soft_cap(logits.clone(), 30.0)
    assert soft_cap(logits, 30.0) is logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert logits.abs().max() <= 30


def test_soft_cap_rounds_half_precision_after_each_operation(device: str) -> None:
    logits = torch.linspace(-90, 90, 1001, device=device).half()
    expected = reference.soft_cap(logits.clone(), 30.0)
    torch.testing.assert_close(soft_cap(logits, 30.0), expected, atol=1e-6, rtol=2**-10)


def test_soft_cap_passes_what_no_token_may_have(device: str) -> None:
    logits = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]], device=device)
    found = soft_cap(logits, 30.0)[0].tolist()
    assert found[0] != found[0]
    assert found[1:] == [30.0, -30.0, 0.0]


def test_soft_cap_takes_no_rows_and_refuses_scattered_ones(device: str) -> None:
    assert soft_cap(torch.empty(0, 8, device=device), 30.0).shape == (0, 8)
    with pytest.raises(ValueError, match="contiguous"):
        soft_cap(torch.empty(8, 4, device=device).T, 30.0)
