"""Gaps between the tokens of running streams while a long prompt is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.frontend.cli.bench.record import Record


@dataclass(frozen=True)
class LongPrompts:
    """Load of long streams, and of prompts that arrive meanwhile.

    Each prompt arrives after the first token of the one before.
    """

    streams: int
    stream_tokens: int
    prompt_tokens: int
    prompts: int


def gaps_beside(streams: Sequence[Record], prompts: Sequence[Record]) -> list[float]:
    """Return the gaps that overlap a long prompt, in seconds.

    A gap counts if it overlaps the time from some prompt's start to its first token. The gap under way when that token
    came counts: it holds the step that yielded it, and the stream may have been told of that step a little later. All
    others are gaps of a server without a long prompt, however many there are.
    """
    times = sorted((prompt.start, prompt.first) for prompt in prompts if prompt.first is not None)
    found: list[float] = []
    for record in streams:
        end, place = record.first or 0.0, 0
        for gap in record.gaps:
            begin, end = end, end + gap
            while place < len(times) and times[place][1] <= begin:
                place += 1
            if place < len(times) and times[place][0] < end:
                found.append(gap)
    return found
