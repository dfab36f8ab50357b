"""The sum of a mixture and its shared expert, against plain torch."""

import pytest
import torch

from tandem.engine_core.kernels.moe.shared_expert import add_shared_expert
from tandem.engine_core.kernels.reference import moe

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 64), (3, 200), (9, 2048)])
def test_the_sum_equals_the_oracle(tokens: int, width: int, device: str) -> None:
    torch.manual_seed(width)
    x, shared, routed = (torch.randn(tokens, width, device=device) for _ in range(3))
    gate = torch.randn(1, width, device=device) / width**0.5
    found = add_shared_expert(x, gate, shared, routed)
    torch.testing.assert_close(found, moe.add_shared_expert(x, gate, shared, routed), atol=1e-5, rtol=1e-5)


def test_a_closed_gate_leaves_the_other_experts(device: str) -> None:
    x, shared, routed = (
        torch.ones(2, 32, device=device),
        torch.ones(2, 32, device=device),
        torch.randn(2, 32).to(device),
    )
    assert torch.equal(add_shared_expert(x, torch.full((1, 32), -9.0, device=device), shared, routed), routed)
