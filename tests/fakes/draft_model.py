"""The keys and values of a draft model, as a part of the fake runtime."""

from itertools import accumulate

from tandem.engine_core.plan import catch_up_tokens
from tests.fakes.model import fold

Slots = list[int]
"""Slot of each position of a row, from the first on."""


class FakeDraftModel:
    """A pool of its own, in which a slot holds the position and the fold of all tokens up to it.

    Drafts of a row over anything else than the keys and values of its known tokens are an assertion: they would be
    accepted less often, which no token shows.
    """

    def __init__(self, max_rows: int) -> None:
        self.pool: dict[int, tuple[int, int]] = {}
        self.lengths = [0] * (max_rows + 1)
        """Number of leading positions that the model has computed, by row."""
        self.drafted = self.lacking = self.caught_up = 0
        """Number of rows of steps with drafts that could draft, of those that lacked positions, and of decode rows
        whose positions were made up for as a prompt."""

    def compute(self, row: int, tokens: list[int], slots: Slots, start: int, end: int) -> None:
        """Compute known tokens as a prompt, on top of what the model has."""
        self.check(tokens, slots, start)
        self._write(tokens, slots, start, end)
        self.lengths[row] = end

    def begin(self, row: int, tokens: list[int], slots: Slots, num_rows: int) -> bool:
        """Compute what a row lacks before its first draft; return False if that is too much."""
        first = min(self.lengths[row], len(tokens) - 1)
        end = min(first + catch_up_tokens(num_rows), len(tokens))
        self._write(tokens, slots, first, end)
        self.lengths[row] = end
        is_ready = end == len(tokens)
        if is_ready:
            self.check(tokens, slots, len(tokens))
        self.drafted, self.lacking = self.drafted + is_ready, self.lacking + (not is_ready)
        return is_ready

    def follow(self, tokens: list[int], slots: Slots, drafts: list[int]) -> None:
        """Compute all drafts of a row but the last."""
        self._write([*tokens, *drafts], slots, len(tokens), len(tokens) + len(drafts) - 1)

    def check(self, tokens: list[int], slots: Slots, end: int) -> None:
        """Check that the positions below `end` hold the keys and values of these tokens."""
        states = self._states(tokens)
        for position in range(end):
            found, expected = self.pool.get(slots[position]), (position, states[position])
            assert found == expected, f"the draft model reads {found}, not {expected}"

    def free(self, first: int, end: int) -> None:
        """Erase slots."""
        for slot in range(first, end):
            self.pool.pop(slot, None)

    def _write(self, tokens: list[int], slots: Slots, first: int, end: int) -> None:
        states = self._states(tokens)
        for position in range(first, end):
            self.pool[slots[position]] = position, states[position]

    def _states(self, tokens: list[int]) -> list[int]:
        return list(accumulate(tokens, fold, initial=0))[1:]
