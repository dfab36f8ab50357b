"""The random numbers against the known answers of the Random123 library, and their Gumbel noise."""

import math

import pytest
import torch

from tandem.engine_core.kernels.reference.philox import gumbel_noise, philox, uniform

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The same function with Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & ONES, first >> 32 ^ c[3] ^ k[1], first & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c = [torch.tensor([word]) for word in counter]
    k = [torch.tensor([word]) for word in key]
    assert philox((c[0], c[1], c[2], c[3]), (k[0], k[1])).tolist() == [list(words)]
    assert philox_by_hand(list(counter), list(key)) == list(words)


def test_noise_uses_the_stated_integers() -> None:
    rows = [(5, 0, 17), (2**63 - 1, 3, 4095), (2**40 + 9, 1, 0)]
    seed, choice, position = torch.tensor(rows).unbind(1)
    noise = gumbel_noise(seed, choice, position, 11)
    assert noise.shape == (3, 11)
    assert noise.dtype == torch.float32
    for row, (s, c, p) in enumerate(rows):
        for token in range(11):
            word = philox_by_hand([token // 4, p, c, 0], [s & ONES, s >> 32])[token % 4]
            u = ((word >> 9) + 0.5) * 2.0**-23
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-5, abs=1e-6)


def test_uniform_never_reaches_its_ends() -> None:
    extremes = uniform(torch.tensor([0, 511, 512, ONES]))
    assert extremes.tolist() == [2.0**-24, 2.0**-24, 1.5 * 2.0**-23, 1 - 2.0**-24]
    assert ((-(-extremes.log()).log()).isfinite()).all()


def test_noise_does_not_depend_on_the_batch() -> None:
    seed, choice, position = torch.arange(60).view(3, 20)
    together = gumbel_noise(seed, choice, position, 130)
    for row in range(20):
        part = slice(row, row + 1)
        assert torch.equal(gumbel_noise(seed[part], choice[part], position[part], 130)[0], together[row])
    assert torch.equal(gumbel_noise(seed, choice, position, 77), together[:, :77])


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_each_input_changes_everything(varied: int) -> None:
    rows = torch.tensor([[7, 1, 9], [7, 1, 9]])
    rows[1, varied] += 1
    first, second = gumbel_noise(*rows.unbind(1), 1000)
    assert (first == second).sum() < 3
    assert torch.corrcoef(torch.stack((first, second)))[0, 1].abs() < 0.12


def test_noise_of_a_part_is_a_part_of_the_noise_of_its_stream() -> None:
    seed, choice, position = torch.arange(6).view(3, 2)
    whole = gumbel_noise(seed, choice, position, 64, stream=3)
    first = torch.tensor([8, 60])
    part = gumbel_noise(seed, choice, position, 4, stream=3, first=first)
    assert torch.equal(part, torch.stack((whole[0, 8:12], whole[1, 60:64])))
    assert (whole == gumbel_noise(seed, choice, position, 64)).sum() < 3


def test_noise_has_the_moments_of_gumbel() -> None:
    zero = torch.zeros(64, dtype=torch.int64)
    noise = gumbel_noise(zero + 123, zero, torch.arange(64), 4096).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
