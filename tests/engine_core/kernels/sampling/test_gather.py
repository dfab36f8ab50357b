"""The gather of the sampled tokens, against its oracle: copies, so they must be equal."""

import pytest
import torch

from tandem.engine_core.kernels.sampling.gather import gather_samples, gather_samples_reference


@pytest.mark.parametrize("width", [8, 100, 2500])
@pytest.mark.parametrize("places", [0, 1, 7])
def test_gathered_samples_equal_the_oracle(places: int, width: int, device: str) -> None:
    tokens = 20
    hidden = torch.randn(tokens, width, device=device)
    rows = torch.randint(1, 9, (tokens,), dtype=torch.int32, device=device)
    positions = torch.randint(1, 99, (tokens,), dtype=torch.int32, device=device)
    index = torch.randint(-tokens, tokens, (places,), device=device).clamp(min=-1).int()
    found, expected = ([torch.full((places,), -7, dtype=torch.int32, device=device) for _ in range(2)] for _ in "12")
    states = gather_samples(hidden, rows, positions, index, *found)
    assert torch.equal(states, gather_samples_reference(hidden, rows, positions, index, *expected))
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)


def test_an_unused_slot_is_padding(device: str) -> None:
    hidden = torch.arange(6.0, device=device).view(3, 2)
    rows, positions = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([4, 5, 6], [7, 8, 9]))
    index = torch.tensor([2, -1, 1, -1], dtype=torch.int32, device=device)
    sample_rows, sample_positions = torch.ones_like(index), torch.ones_like(index)
    states = gather_samples(hidden, rows, positions, index, sample_rows, sample_positions)
    assert sample_rows.tolist() == [6, 0, 5, 0]
    assert sample_positions.tolist() == [9, 0, 8, 0]
    assert states[[0, 2]].tolist() == [[4.0, 5.0], [2.0, 3.0]]
