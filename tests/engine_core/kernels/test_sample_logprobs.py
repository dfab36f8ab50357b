"""Log-probabilities of single tokens in Triton against torch."""

import pytest
import torch

from engine_core.kernels.logprobs import gather_logprobs

# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("vocab", "wanted"), [(1, 1), (64, 3), (333, 20)])
def test_logprobs(vocab: int, wanted: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(4, vocab, generator=generator) * 20).to(device)
    ids = torch.randint(0, vocab, (4, wanted), generator=generator).to(device)
    found = gather_logprobs(logits, ids, block=64)
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, ids), atol=2e-5, rtol=1e-6)


def test_what_has_no_probability(device: str) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0, 10:] = -torch.inf
    logits[1, ::2] = torch.nan
    logits[2] = -torch.inf
    ids = torch.tensor([[3, 50, -1], [1, 2, 100], [0, 1, -1]], dtype=torch.int32, device=device)
    found = gather_logprobs(logits, ids, block=32)
    low = -torch.inf
    expected = torch.tensor([[0.1, 0, 0], [0.02, 0, 0], [0, 0, 0]], device=device).log()
    assert torch.equal(found == low, expected == low)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_nothing_wanted(device: str) -> None:
    logits = torch.zeros(2, 10, device=device)
    assert gather_logprobs(logits, torch.zeros(2, 0, dtype=torch.int32, device=device)).shape == (2, 0)
