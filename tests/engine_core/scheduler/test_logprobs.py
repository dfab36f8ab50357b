"""Distribution of a step's log-probability records over frontends."""

import pytest
from msgspec import structs

from tandem.engine_core.contracts import StepLogprobs, StepResult, TokenDelta
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.scheduler.logprobs import add_logprobs, max_logprobs
from tandem.engine_core.sequence import Sequence
from tandem.protocol.codec import pack_floats, pack_ids, read_logprobs, unpack_ids
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, TokenLogprobs
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import submitted


def sequence(number: int, logprobs: int | None = None, prompt_logprobs: int | None = None) -> Sequence:
    client = b"odd" if number % 2 else b"even"
    wanted = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return submitted(number, range(10, 16), SamplingParams(3), client=client, request_id=100 + number, **wanted)


def step(top: int, count: int) -> StepLogprobs:
    """Return records; the i-th has value i for its own token, then i + rank / 8 for id 1000 * i + rank."""
    records = b""
    for record in range(count):
        records += pack_floats([float(record), *[record + rank / 8 for rank in range(top)]])
        records += pack_ids([1000 * record + rank for rank in range(top)])
    return StepLogprobs(top, records)


def reported(
    rows: list[ScheduledSequence],
    held: list[Sequence],
    logprobs: StepLogprobs,
    counts: list[int] | None = None,
    taken: list[int] | None = None,
) -> dict[bytes, TokenDelta]:
    """Return the deltas of a step.

    counts: sampled tokens of each row, one where it samples by default; taken: how many of them its sequence took, all
    by default.
    """
    by_id = {seq.id: seq for seq in held}
    sequences = [by_id[row.seq_id] for row in rows]
    counts = counts or [int(row.samples) for row in rows]
    known = [len(seq.tokens) if not row.samples else row.end for row, seq in zip(rows, sequences, strict=True)]
    for row, seq, count in zip(rows, sequences, taken or counts, strict=True):
        if row.samples:
            seq.tokens.extend([7] * (row.end + count - len(seq.tokens)))
    live = [seq if seq.outcome is None else None for seq in sequences]
    deltas: dict[bytes, TokenDelta] = {}
    add_logprobs(rows, live, known, StepResult(counts, [7] * sum(counts), logprobs), deltas)
    return deltas


def check(part: TokenLogprobs, first: int, count: int, top: int) -> None:
    """Check that the part holds `count` of the step's records from `first` on."""
    assert part.top == top
    expected = []
    for record in range(first, first + count):
        ids = [1000 * record + rank for rank in range(top)]
        expected.append((float(record), ids, [record + rank / 8 for rank in range(top)]))
    assert read_logprobs(part) == expected


@pytest.mark.parametrize(
    ("logprobs", "prompt_logprobs", "most"), [(None, None, -1), (0, None, 0), (None, 0, 0), (3, 5, 5), (7, 2, 7)]
)
def test_max_logprobs_is_the_larger_request(logprobs: int | None, prompt_logprobs: int | None, most: int) -> None:
    assert max_logprobs(sequence(1, logprobs, prompt_logprobs)) == most


def test_each_sequence_gets_its_own_records() -> None:
    """Three samples (1, 3, 4), then the scored positions of 1 and 2; sequence 3 asked for nothing and gets nothing."""
    held = [sequence(1, 2, 4), sequence(2, None, 0), sequence(3), sequence(4, 4)]
    rows = [
        ScheduledSequence(1, 1, 2, 4, True, prompt_logprob_ids=pack_ids([13, 14, 15])),
        ScheduledSequence(2, 2, 0, 2, False, prompt_logprob_ids=pack_ids([11, 12])),
        ScheduledSequence(3, 3, 7, 1, True),
        ScheduledSequence(4, 4, 6, 1, True),
    ]
    deltas = reported(rows, held, step(4, 8))
    prompt, output = deltas[b"odd"].logprobs
    assert (prompt.request_id, prompt.start) == (101, 3)
    check(prompt, 3, 3, 4)
    assert (output.request_id, output.start) == (101, 6)
    check(output, 0, 1, 2)
    prompt, output = deltas[b"even"].logprobs
    assert (prompt.request_id, prompt.start) == (102, 1)
    check(prompt, 6, 2, 0)
    assert (output.request_id, output.start) == (104, 7)
    check(output, 2, 1, 4)
    assert all(not delta.tokens for delta in deltas.values())


def test_prompt_tokens_get_their_ranks_and_generated_ones_none() -> None:
    held = [sequence(1, 2, 4), sequence(2, None, 0)]
    held[0].wire.reported_len = 3  # The first position was scored before a preemption.
    rows = [
        ScheduledSequence(1, 1, 2, 4, True, prompt_logprob_ids=pack_ids([13, 14, 15])),
        ScheduledSequence(2, 2, 0, 2, False, prompt_logprob_ids=pack_ids([11, 12])),
    ]
    logprobs = structs.replace(step(4, 6), ranks=pack_ids([31, 32, 33, 34, 35]))
    deltas = reported(rows, held, logprobs)
    parts = [*deltas[b"odd"].logprobs, *deltas[b"even"].logprobs]
    assert [(part.start, unpack_ids(part.ranks)) for part in parts] == [(4, [32, 33]), (6, []), (1, [34, 35])]


def test_zombies_and_rejected_tokens_get_no_records() -> None:
    held = [sequence(1, 1, 1), sequence(2, 1), sequence(4, 1)]
    held[0].outcome = Finished(101, FinishReason.ABORT)
    rows = [
        ScheduledSequence(1, 1, 0, 6, True, prompt_logprob_ids=pack_ids([11])),
        ScheduledSequence(2, 2, 6, 1, True),
        ScheduledSequence(4, 4, 6, 1, True),
    ]
    (delta,) = reported(rows, held, step(1, 4), taken=[0, 0, 1]).values()
    (part,) = delta.logprobs
    assert part.request_id == 104
    check(part, 2, 1, 1)


def test_prompt_tokens_scored_before_a_preemption_are_not_reported_twice() -> None:
    """Three of six prompt tokens had been computed before: the frontend has the records of what follows them."""
    seq = sequence(1, None, 1)
    seq.wire.reported_len = 3
    chunks = [
        ScheduledSequence(1, 1, 0, 2, False, prompt_logprob_ids=pack_ids([11, 12])),
        ScheduledSequence(1, 1, 2, 4, True, prompt_logprob_ids=pack_ids([13, 14, 15])),
    ]
    assert reported(chunks[:1], [seq], step(1, 2)) == {}
    (delta,) = reported(chunks[1:], [seq], step(1, 4)).values()
    (part,) = delta.logprobs
    assert (part.request_id, part.start) == (101, 4)
    check(part, 2, 2, 1)


def test_every_token_of_a_run_has_a_record_unless_it_was_dropped() -> None:
    """Sequence 1 takes two of its three tokens, sequence 2 samples none, sequence 4 takes both of its two."""
    held = [sequence(1, 1), sequence(2, 1), sequence(4, 1)]
    rows = [ScheduledSequence(1, 1, 5), ScheduledSequence(2, 2, 5), ScheduledSequence(4, 4, 5)]
    deltas = reported(rows, held, step(1, 5), counts=[3, 0, 2], taken=[2, 0, 2])
    (odd,), (even,) = deltas[b"odd"].logprobs, deltas[b"even"].logprobs
    assert (odd.request_id, odd.start) == (101, 6)
    check(odd, 0, 2, 1)
    assert (even.request_id, even.start) == (104, 6)
    check(even, 3, 2, 1)
