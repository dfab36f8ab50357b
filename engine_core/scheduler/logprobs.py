"""Which frontend gets which of a step's log-probabilities."""

from collections.abc import Container, Mapping
from collections.abc import Sequence as Rows

from tandem.engine_core.contracts import StepLogprobs, TokenDelta
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import TokenLogprobs


def max_logprobs(seq: Sequence) -> int:
    """Most alternatives that a sequence wants anywhere; -1: it wants no log-probabilities."""
    return max([-1 if top is None else top for top in (seq.logprobs, seq.prompt_logprobs)])


def attach(
    rows: Rows[ScheduledSequence],
    held: Mapping[int, Sequence],
    refused: Container[int],
    logprobs: StepLogprobs,
    deltas: dict[bytes, TokenDelta],
) -> None:
    """Adds to each frontend's delta what its sequences asked for.

    Called before the step's tokens are committed: a sequence that has ended by then is a zombie and gets nothing.
    refused: sequences whose token nobody will hear of.
    """
    sampled, scored = 0, sum([row.samples for row in rows])
    for row in rows:
        seq = held[row.seq_id]
        targets = len(row.targets) // 4
        if seq.outcome is None:
            told = min(targets, max(0, seq.reported_len - row.start))
            if targets > told and seq.prompt_logprobs is not None:
                first = row.start + told
                _add(deltas, seq, first + 1, seq.prompt_logprobs, logprobs, scored + told, targets - told)
            if row.samples and seq.logprobs is not None and seq.id not in refused:
                _add(deltas, seq, row.end, seq.logprobs, logprobs, sampled, 1)
        sampled += row.samples
        scored += targets


def _add(
    deltas: dict[bytes, TokenDelta], seq: Sequence, start: int, top: int, logprobs: StepLogprobs, first: int, count: int
) -> None:
    """`count` of the step's lines from `first` on, for the tokens from position `start` on."""
    delta = deltas.setdefault(seq.client, TokenDelta([], []))
    delta.logprobs.append(TokenLogprobs(seq.request_id, start, top, _cut(logprobs, first, count, top)))


def _cut(logprobs: StepLogprobs, first: int, count: int, top: int) -> bytes:
    """Some of the step's lines, each with its `top` best alternatives alone."""
    size = 4 * (1 + 2 * logprobs.top)
    lines = logprobs.lines[first * size : (first + count) * size]
    if top == logprobs.top:
        return lines
    values, ids = 4 * (1 + top), 4 * (1 + logprobs.top)
    starts = range(0, count * size, size)
    return b"".join([lines[at : at + values] + lines[at + ids : at + ids + 4 * top] for at in starts])
