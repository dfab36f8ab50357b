"""Who gets which of a step's lines."""

from array import array

import pytest

from tandem.engine_core.contracts import StepLogprobs, TokenDelta
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.scheduler.logprobs import attach, max_logprobs
from tandem.engine_core.sequence import Sequence
from tandem.protocol.codec import pack_floats, pack_ids, read_logprobs
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, TokenLogprobs
from tandem.protocol.params import SamplingParams


def sequence(number: int, logprobs: int | None = None, prompt_logprobs: int | None = None) -> Sequence:
    client = b"odd" if number % 2 else b"even"
    prompt = array("i", range(10, 16))
    return Sequence(
        number, client, 100 + number, prompt, SamplingParams(3), frozenset(),
        logprobs=logprobs, prompt_logprobs=prompt_logprobs,
    )  # fmt: skip


def step(top: int, count: int) -> StepLogprobs:
    """Line i says i of its own token, then i + rank / 8 of id 1000 * i + rank."""
    lines = b""
    for line in range(count):
        lines += pack_floats([float(line), *[line + rank / 8 for rank in range(top)]])
        lines += pack_ids([1000 * line + rank for rank in range(top)])
    return StepLogprobs(top, lines)


def told(
    rows: list[ScheduledSequence], held: list[Sequence], logprobs: StepLogprobs, refused: set[int]
) -> dict[bytes, TokenDelta]:
    deltas: dict[bytes, TokenDelta] = {}
    attach(rows, {seq.id: seq for seq in held}, refused, logprobs, deltas)
    return deltas


def check(part: TokenLogprobs, first: int, count: int, top: int) -> None:
    """The part holds `count` of the step's lines from `first` on."""
    assert part.top == top
    expected = []
    for line in range(first, first + count):
        ids = [1000 * line + rank for rank in range(top)]
        expected.append((float(line), ids, [line + rank / 8 for rank in range(top)]))
    assert read_logprobs(part) == expected


@pytest.mark.parametrize(
    ("logprobs", "prompt_logprobs", "most"), [(None, None, -1), (0, None, 0), (None, 0, 0), (3, 5, 5), (7, 2, 7)]
)
def test_most_wanted(logprobs: int | None, prompt_logprobs: int | None, most: int) -> None:
    assert max_logprobs(sequence(1, logprobs, prompt_logprobs)) == most


def test_each_gets_its_own_lines() -> None:
    """Three samples (1, 3, 4), then the scored positions of 1 and 2; who asked for nothing gets nothing."""
    held = [sequence(1, 2, 4), sequence(2, None, 0), sequence(3), sequence(4, 4)]
    rows = [
        ScheduledSequence(1, 1, 2, 4, True, targets=pack_ids([13, 14, 15])),
        ScheduledSequence(2, 2, 0, 2, False, targets=pack_ids([11, 12])),
        ScheduledSequence(3, 3, 7, 1, True),
        ScheduledSequence(4, 4, 6, 1, True),
    ]
    deltas = told(rows, held, step(4, 8), set())
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


def test_zombies_and_refused_tokens_are_passed_over() -> None:
    held = [sequence(1, 1, 1), sequence(2, 1), sequence(4, 1)]
    held[0].outcome = Finished(101, FinishReason.ABORT)
    rows = [
        ScheduledSequence(1, 1, 0, 6, True, targets=pack_ids([11])),
        ScheduledSequence(2, 2, 6, 1, True),
        ScheduledSequence(4, 4, 6, 1, True),
    ]
    (delta,) = told(rows, held, step(1, 4), {2}).values()
    (part,) = delta.logprobs
    assert part.request_id == 104
    check(part, 2, 1, 1)


def test_after_a_preemption_nothing_is_told_twice() -> None:
    """Of six prompt tokens three had been computed before: what follows those is known to the frontend."""
    seq = sequence(1, None, 1)
    seq.reported_len = 3
    chunks = [
        ScheduledSequence(1, 1, 0, 2, False, targets=pack_ids([11, 12])),
        ScheduledSequence(1, 1, 2, 4, True, targets=pack_ids([13, 14, 15])),
    ]
    assert told(chunks[:1], [seq], step(1, 2), set()) == {}
    (delta,) = told(chunks[1:], [seq], step(1, 4), set()).values()
    (part,) = delta.logprobs
    assert (part.request_id, part.start) == (101, 4)
    check(part, 2, 2, 1)
