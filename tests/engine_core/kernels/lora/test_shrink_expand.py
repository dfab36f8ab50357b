"""Low-rank updates of any mix of adapters: the kernels against their oracle."""

from random import Random

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.lora.group_tokens import LARGE_BLOCK, SMALL_BLOCK, group_tokens, max_blocks
from tandem.engine_core.kernels.lora.shrink_expand import add_lora, choose_split
from tandem.engine_core.kernels.reference import lora as reference

INPUTS = 200
SLOTS, MAX_RANK = 4, 24


def slots_of(tokens: int, device: str, seed: int = 0, most: int = SLOTS) -> Tensor:
    random = Random(seed)
    return torch.tensor([random.randint(0, most) for _ in range(tokens)], dtype=torch.int32, device=device)


@pytest.mark.parametrize(("tokens", "most"), [(1, 4), (5, 4), (16, 1), (70, 4), (256, 3), (257, 4), (600, 2)])
def test_every_token_with_an_adapter_is_in_one_block_of_it(tokens: int, most: int, device: str) -> None:
    slots = slots_of(tokens, device, most=most)
    blocks = group_tokens(slots, SLOTS).blocks
    assert blocks is not None
    assert blocks.order.shape[1] == (SMALL_BLOCK if tokens <= 256 else LARGE_BLOCK)
    found: list[tuple[int, int]] = []
    for slot, order in zip(blocks.slots.tolist(), blocks.order.tolist(), strict=True):
        own = [token for token in order if token >= 0]
        assert not slot or (own and own == sorted(own) and order[: len(own)] == own)
        found += [(slot, token) for token in own if slot]
    expected = [(slot, token) for token, slot in enumerate(slots.tolist()) if slot]
    assert found == sorted(expected)


def test_blocks_suffice_for_any_tokens() -> None:
    for tokens in range(1, 40):
        for slots in (1, 3, 9):
            alone = min(tokens, slots)
            worst = alone + (tokens - alone) // 16
            assert max_blocks(tokens, slots, 16) >= worst


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [(1, (0, 48)), (3, (0, 64, 80, 96)), (40, (0, 130, 260)), (20, (0, 96, 160, 166, 172)), (300, (0, 40))],
)
def test_the_update_equals_the_oracle(tokens: int, starts: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    parts = len(starts) - 1
    x, y = torch.randn(tokens, INPUTS, device=device), torch.randn(tokens, starts[-1], device=device)
    # Memory behind the rank of an adapter holds what an earlier one left there.
    a = torch.full((SLOTS, parts, MAX_RANK, INPUTS), torch.nan, device=device)
    b = torch.full((SLOTS, MAX_RANK, starts[-1]), torch.nan, device=device)
    random = Random(1)
    ranks = torch.zeros(SLOTS + 1, parts, dtype=torch.int32)
    for slot in range(1, SLOTS + 1):
        for part in range(parts):
            rank = random.choice((0, 1, 8, 16, 17, MAX_RANK))
            ranks[slot, part] = rank
            a[slot - 1, part, :rank] = torch.randn(rank, INPUTS, device=device) / 10
            b[slot - 1, :rank, starts[part] : starts[part + 1]] = 0.1
            b[slot - 1, :rank, starts[part] : starts[part + 1]] += torch.randn(rank, 1, device=device)
    ranks[1] = 8
    slots = slots_of(tokens, device)
    slots[0] = 1
    a[0, :, :8], b[0, :8] = 0.01, 0.5
    ranks = ranks.to(device)
    expected = reference.add_lora(y.clone(), x, AdapterTokens(slots), a, b, ranks, starts)
    found = add_lora(y.clone(), x, group_tokens(slots, SLOTS), a, b, ranks, starts)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[slots == 0], y[slots == 0])
    assert not torch.equal(found[0], y[0])


def test_the_oracle_is_the_product_of_two_matrices() -> None:
    torch.manual_seed(0)
    x, a, b = torch.randn(6, 32), torch.randn(2, 1, 8, 32), torch.randn(2, 8, 20)
    tokens = AdapterTokens(torch.tensor([0, 2, 1, 2, 0, 1], dtype=torch.int32))
    ranks = torch.tensor([[0], [8], [4]], dtype=torch.int32)
    found = reference.add_lora(torch.zeros(6, 20), x, tokens, a, b, ranks, (0, 20))
    first, second = x @ a[0, 0].t() @ b[0], x @ a[1, 0, :4].t() @ b[1, :4]
    zeros = torch.zeros(20)
    torch.testing.assert_close(found, torch.stack([zeros, second[1], first[2], second[3], zeros, first[5]]))


def test_few_programs_share_their_inputs() -> None:
    assert choose_split(1, 4096) == choose_split(3, 4096) == 16
    assert choose_split(1, 2048) == 8
    assert choose_split(400, 4096) == 1
    assert choose_split(1, 128) == 1
