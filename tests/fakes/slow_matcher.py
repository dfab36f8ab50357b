"""Matcher whose masks take time by fake clocks, and an executor for it."""

import ctypes
from collections.abc import Sequence

from tests.fakes.clock import FakeClock


class SlowMatcher:
    """Fake of `llguidance.LLMatcher` that allows every token and has no end."""

    def __init__(self, *costs: tuple[FakeClock, float]) -> None:
        """Keep the seconds by which each mask moves each clock."""
        self.costs = costs
        self.num_masks = 0

    def deep_copy(self) -> "SlowMatcher":
        return SlowMatcher(*self.costs)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.num_masks += 1
        for clock, seconds in self.costs:
            clock.advance(seconds)
        ctypes.memset(address, 0xFF, size)

    def is_stopped(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def compute_ff_tokens(self) -> list[int]:
        return []

    def consume_token(self, token: int) -> bool:
        return True


class SlowExecutor:
    """Fake of `llguidance.LLExecutor` that computes one mask after another."""

    def __init__(self, *costs: tuple[FakeClock, float]) -> None:
        """Keep the seconds by which each call moves each clock, beside its masks."""
        self.costs = costs
        self.num_masks: list[int] = []
        """Number of masks of each call."""
        self.matchers: list[SlowMatcher] = []
        """Matchers of the last call, in their order."""

    def unsafe_compute_mask_ptr(
        self, masks: Sequence[tuple[SlowMatcher, int]], address: int, size: int, count: int
    ) -> None:
        if not masks:
            raise ValueError("No interpreters")
        assert all(0 <= index < count for _, index in masks)
        self.num_masks.append(len(masks))
        self.matchers = [matcher for matcher, _ in masks]
        for clock, seconds in self.costs:
            clock.advance(seconds)
        for matcher, index in masks:
            matcher.unsafe_compute_mask_ptr(address + index * size, size)
