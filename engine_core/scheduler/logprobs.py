"""Distribute a step's log-probabilities to the frontends."""

from collections.abc import Sequence as Items

from tandem.engine_core.contracts import StepLogprobs, StepResult, TokenDelta
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import TokenLogits, TokenLogprobs


def max_logprobs(seq: Sequence) -> int:
    """Return the largest number of alternatives that a sequence wants for a token.

    -1 if it wants no log-probabilities.
    """
    wanted = seq.submit.logprobs, seq.submit.prompt_logprobs
    return max([-1 if top is None else top for top in wanted])


def add_logprobs(
    rows: Items[ScheduledSequence],
    sequences: Items[Sequence | None],
    known: Items[int],
    result: StepResult,
    deltas: dict[bytes, TokenDelta],
) -> None:
    """Add the log-probabilities that each sequence asked for to its client's delta.

    Called after the step's tokens were appended: sampled tokens that their sequence did not take (rejected by a
    grammar, or after an end) get none. Log-probabilities of prompt tokens below `reported_len` were sent before a
    preemption and are not sent again.

    sequences: the sequence of each row, None where it had ended before this step's results; known: number of tokens of
    each before this step's.
    """
    assert result.logprobs is not None, "a step without log-probabilities"
    logprobs = result.logprobs
    sampled, first_scored = 0, len(result.tokens)
    for row, seq, before, count in zip(rows, sequences, known, result.counts, strict=True):
        num_scored = row.num_scored
        if seq is not None:
            reported = _num_reported(row, seq)
            if num_scored > reported and (top := seq.submit.prompt_logprobs) is not None:
                first, index = row.start + row.num_unscored + reported, first_scored + reported
                number = index - len(result.tokens)
                ranks = logprobs.ranks[4 * number : 4 * (number + num_scored - reported)]
                _add(deltas, seq, first + 1, top, logprobs, index, num_scored - reported, ranks)
            taken = min(count, len(seq.tokens) - before)
            if taken > 0 and (top := seq.submit.logprobs) is not None:
                _add(deltas, seq, before, top, logprobs, sampled, taken)
        sampled += count
        first_scored += num_scored


def add_logits(
    rows: Items[ScheduledSequence],
    sequences: Items[Sequence | None],
    logits: Items[bytes],
    deltas: dict[bytes, TokenDelta],
) -> None:
    """Add the logits that a step returns to the deltas of their clients.

    sequences: as in `add_logprobs`; logits: as in `StepResult.logits`.
    """
    wanted = [(row, seq) for row, seq in zip(rows, sequences, strict=True) if row.logits]
    for (row, seq), own in zip(wanted, logits, strict=True):
        if seq is None or not own:
            continue
        reported = _num_reported(row, seq)
        if reported < row.num_logits:
            first = row.start + row.num_unscored + 1 if row.num_scored else row.end
            new = own[len(own) // row.num_logits * reported :]
            delta = deltas.setdefault(seq.client, TokenDelta([], []))
            delta.logits.append(TokenLogits(seq.request_id, first + reported, new))


def _num_reported(row: ScheduledSequence, seq: Sequence) -> int:
    """Return the number of a row's scored positions that were reported before a preemption."""
    return min(row.num_scored, max(0, seq.wire.reported_len - row.start - row.num_unscored))


def _add(
    deltas: dict[bytes, TokenDelta],
    seq: Sequence,
    start: int,
    top: int,
    logprobs: StepLogprobs,
    first: int,
    count: int,
    ranks: bytes = b"",
) -> None:
    """Add `count` of the step's records, from `first` on, to a delta.

    The records belong to the tokens from position `start` on, as do the ranks.
    """
    delta = deltas.setdefault(seq.client, TokenDelta([], []))
    delta.logprobs.append(TokenLogprobs(seq.request_id, start, top, _cut(logprobs, first, count, top), ranks))


def _cut(logprobs: StepLogprobs, first: int, count: int, top: int) -> bytes:
    """Return `count` records from `first` on, with `top` alternatives each."""
    size = 4 * (1 + 2 * logprobs.top)
    records = logprobs.records[first * size : (first + count) * size]
    if top == logprobs.top:
        return records
    values, ids = 4 * (1 + top), 4 * (1 + logprobs.top)
    starts = range(0, count * size, size)
    return b"".join([records[at : at + values] + records[at + ids : at + ids + 4 * top] for at in starts])
