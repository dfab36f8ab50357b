"""The model that simulations run: the next token is a hash of all tokens so far, under the same rules as the real one.

`fold` is what one KV position holds. It depends on everything before it, so a position read from a page that was
freed, overwritten or never written changes every later token.
"""

from collections.abc import Callable, Sequence

VOCAB = 40
END = 1


def fold(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 7) & 0xFFFF_FFFF


def choose(state: int, forbidden: frozenset[int], allowed: Callable[[int], bool]) -> int:
    candidates = [token for token in range(1, VOCAB) if token not in forbidden and allowed(token)]
    return candidates[(state >> 3) % len(candidates)]


class ParityConstraint:
    """A constraint with a state: even and odd tokens take turns, the end token is allowed on even turns."""

    def __init__(self) -> None:
        self.turn = 0

    def allows(self, token: int) -> bool:
        return token == END or token % 2 == 0 if self.turn == 0 else token % 2 == 1 and token != END

    def mask(self) -> bytes:
        bits = sum(1 << token for token in range(VOCAB) if self.allows(token))
        return bits.to_bytes(8, "little")

    def accept(self, token: int) -> None:
        assert self.allows(token), f"token {token} was not allowed on turn {self.turn}"
        self.turn = 1 - self.turn


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    end_ids: frozenset[int],
    min_tokens: int = 0,
    constraint: ParityConstraint | None = None,
) -> list[int]:
    """What a sequence must yield: one token after the other, nothing batched, nothing in flight."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        forbidden = end_ids if len(tokens) < min_tokens else frozenset()
        token = choose(state, forbidden, constraint.allows if constraint else lambda _: True)
        tokens.append(token)
        if constraint:
            constraint.accept(token)
        if token in end_ids and len(tokens) > min_tokens:
            break
        state = fold(state, token)
    return tokens
