"""The model that simulations run: the next token is a hash of all tokens so far, under the same rules as the real one.

`fold` is what one KV position holds. It depends on everything before it, so a position read from a page that was
freed, overwritten or never written changes every later token.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from tandem.protocol.codec import pack_floats, pack_ids

VOCAB = 40
END = 1


def fold(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 7) & 0xFFFF_FFFF


def choose(state: int, forbidden: frozenset[int], allowed: Callable[[int], bool]) -> int:
    """Return the token after a state; 0 where no token is allowed."""
    candidates = [token for token in range(1, VOCAB) if token not in forbidden and allowed(token)]
    if not candidates:
        return 0
    return candidates[(state >> 3) % len(candidates)]


def logprob_record(state: int, token: int, top: int) -> bytes:
    """Return the fake runtime's record of a token after a state, in the format of `TokenLogprobs`.

    No other state, token or width gives the same numbers.
    """
    values = [-float((state * 31 + token * 7 + rank) % 100_003) for rank in range(1 + top)]
    return pack_floats(values) + pack_ids([(state + rank) % VOCAB for rank in range(top)])


def logits_row(state: int) -> bytes:
    """Return the fake runtime's logits after a state: one number."""
    return pack_floats([float(state % 100_003)])


def reference_logits(known: Sequence[int], start: int) -> bytes:
    """Return the logits of the tokens from position `start` on, and of the one after them."""
    states = list(accumulate(known, fold, initial=0))[1:]
    return b"".join([logits_row(state) for state in states[start - 1 :]])


def reference_records(prompt: Sequence[int], tokens: Sequence[int], top: int) -> list[bytes]:
    """Return the records of all tokens but the first, by position from 1 on."""
    known = [*prompt, *tokens]
    state, records = fold(0, known[0]), []
    for token in known[1:]:
        records.append(logprob_record(state, token, top))
        state = fold(state, token)
    return records


class ReferenceConstraint(Protocol):
    """Part of a constraint that the reference uses."""

    @property
    def is_complete(self) -> bool: ...

    def allows(self, token: int) -> bool: ...

    def accept(self, token: int) -> bool: ...


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    end_ids: frozenset[int],
    min_tokens: int = 0,
    constraint: ReferenceConstraint | None = None,
    weights: int = 0,
) -> list[int]:
    """Return what a sequence must yield: one token after the other, nothing batched, nothing in flight.

    A constraint that rejects its token ends it. weights: as in `FakeRuntime`.
    """
    state = weights
    for token in prompt:
        state = fold(state, token)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        forbidden = end_ids if len(tokens) < min_tokens else frozenset()
        token = choose(state, forbidden, constraint.allows if constraint else lambda _: True)
        if constraint and not constraint.accept(token):
            break
        tokens.append(token)
        if (token in end_ids and len(tokens) > min_tokens) or (constraint and constraint.is_complete):
            break
        state = fold(state, token)
    return tokens
