"""ITL of running streams during the prefill of long prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.frontend.cli.bench.record import Record


@dataclass(frozen=True)
class LongPrompts:
    """Load of long streams and of long prompts, which each arrive after the first token of the previous one."""

    streams: int
    stream_tokens: int
    prompt_tokens: int
    prompts: int


def gaps_during_prefill(streams: Sequence[Record], prompts: Sequence[Record]) -> list[float]:
    """Return the gaps between tokens that overlap a long prompt, in seconds.

    A gap counts if it overlaps the time from a prompt's start to its first token, including the gap during which that
    token arrived, since the streams may receive the same step a little later.
    """
    times = sorted((prompt.start, prompt.first) for prompt in prompts if prompt.first is not None)
    found: list[float] = []
    for record in streams:
        end, index = record.first or 0.0, 0
        for gap in record.gaps:
            begin, end = end, end + gap
            while index < len(times) and times[index][1] <= begin:
                index += 1
            if index < len(times) and times[index][0] < end:
                found.append(gap)
    return found
