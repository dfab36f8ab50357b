"""Counter-based random numbers: the same integers on every device.

Generators need no synchronized state.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). For the noise of one draw
(`kernels.reference.sampling` defines indices and streams):

- key = (seed mod 2^32, seed >> 32)
- counter = (index // 4, position, choice, stream); the index selects output word index % 4
- u = ((word >> 9) + 0.5) * 2^-23, exact in float32: from 2^-24 to 1 - 2^-24, never 0 or 1
- noise = -log(-log(u)), float32

A round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), where hi and lo are
the 32-bit halves of the 64-bit product, M0 = 0xD2511F53 and M1 = 0xCD9E8D57. Between rounds k0 grows by 0x9E3779B9 and
k1 by 0xBB67AE85, modulo 2^32.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Return the four output words of Philox4x32-10, int64, in a new last dimension: [..., 4].

    counter: four int64 tensors of 32-bit words, of one shape; key: two, broadcastable to it.
    """
    # Signed 64-bit multiplication wraps, which preserves the bits. The words (c0, c2) are masked because they are
    # multiplied; (c1, c3) and the keys may carry garbage above bit 31, which the next mask removes. The constants are
    # tensors because a Python scalar doubles the cost of an operation on a small tensor.
    even = torch.stack((counter[0], counter[2]))
    odd = torch.stack((counter[1], counter[3]))
    keys = torch.stack(key)
    ones = torch.ones_like(keys[0])
    multipliers = torch.stack((ones * MULTIPLIERS[0], ones * MULTIPLIERS[1]))
    growth = torch.stack((ones * KEY_STEPS[0], ones * KEY_STEPS[1]))
    mask, half = ones.new_full((), MASK), ones.new_full((), 32)
    for _ in range(ROUNDS):
        odd, product = odd.bitwise_xor(keys), (even * multipliers).flip(0)
        even = (product >> half).bitwise_xor_(odd).bitwise_and_(mask)
        odd, keys = product, keys + growth
    odd = odd & mask
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1)


def uniform(words: Tensor) -> Tensor:
    """Convert random words to float32 in (0, 1).

    words: 32-bit words in int64. The result is ((word >> 9) + 0.5) * 2^-23.
    """
    return ((words >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(
    seed: Tensor, choice: Tensor, position: Tensor, count: int, stream: int = 0, first: Tensor | None = None
) -> Tensor:
    """Return standard Gumbel noise for `count` indices of every row; see the module docstring.

    seed, choice, position: [S] int64, non-negative; first: [S] int64, first index of each row, a multiple of 4; None
    for 0. Returns [S, count] float32.
    """
    column = seed.unsqueeze(1)
    blocks = torch.arange((count + 3) // 4, device=seed.device).expand(seed.shape[0], -1)
    if first is not None:
        blocks = blocks + (first // 4).unsqueeze(1)
    shape = blocks.shape
    key = (column & MASK, column >> 32)
    counter = (
        blocks,
        position.unsqueeze(1).expand(shape),
        choice.unsqueeze(1).expand(shape),
        torch.full_like(column, stream).expand(shape),
    )
    words = philox(counter, key).flatten(1)[:, :count]
    return uniform(words).log_().neg_().log_().neg_()
