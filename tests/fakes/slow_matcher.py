"""Matcher whose masks take time by fake clocks."""

import ctypes

from tests.fakes.clock import FakeClock


class SlowMatcher:
    """Fake of `llguidance.LLMatcher` that allows every token and has no end."""

    def __init__(self, *costs: tuple[FakeClock, float]) -> None:
        """Keep the seconds by which each mask moves each clock."""
        self.costs = costs
        self.num_masks = 0
        self.copies: list[SlowMatcher] = []

    def deep_copy(self) -> "SlowMatcher":
        self.copies.append(SlowMatcher(*self.costs))
        return self.copies[-1]

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.num_masks += 1
        for clock, seconds in self.costs:
            clock.advance(seconds)
        ctypes.memset(address, 0xFF, size)

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def compute_ff_tokens(self) -> list[int]:
        return []

    def consume_token(self, token: int) -> bool:
        return True
