"""Output kept for one frontend: in order, complete, in one message."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.wire.outbox import Outbox
from tandem.protocol.codec import decode_event, read_drafts, runs
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import (
    DetailedOutput,
    Failure,
    Finished,
    SequenceTimes,
    Started,
    StepOutput,
    TokenLogprobs,
)


def message(box: Outbox, step_id: int = 1) -> StepOutput:
    output = decode_event(box.encode(step_id))
    assert isinstance(output, StepOutput)
    return output


def test_new_outbox_is_empty() -> None:
    box = Outbox()
    assert not box.has_new
    assert message(box, 3) == StepOutput(3, b"", b"", b"")


def test_events_without_tokens_make_a_message() -> None:
    for name, outcome in (
        ("finished", Finished(1, FinishReason.STOP, 5)),
        ("failures", Failure(1, ErrorCode.OVERLOADED, "x")),
        ("started", Started(1, 512)),
    ):
        box = Outbox()
        getattr(box, name).append(outcome)
        assert box.has_new
        assert getattr(message(box), name) == [outcome]
        assert not box.has_new, "what is encoded is told"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=60))
def test_tokens_of_many_steps_share_one_message(told: list[tuple[int, int]]) -> None:
    box = Outbox()
    for request_id, token in told:
        box.request_ids.append(request_id)
        box.tokens.append(token)
    received = [(request_id, token) for request_id, run in runs(message(box, 9)) for token in run]
    assert received == told


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.binary(max_size=8)), max_size=40))
def test_log_probabilities_of_many_steps_share_one_message(told: list[tuple[int, int, bytes]]) -> None:
    box = Outbox()
    for start, (request_id, top, lines) in enumerate(told):
        box.logprobs.append(TokenLogprobs(request_id, start, top, lines))
    assert box.has_new == bool(told)
    received = [(part.request_id, part.top, part.lines) for part in message(box).logprobs]
    assert received == told
    assert not box.has_new


def test_drafts_of_many_steps_share_one_message_of_another_kind() -> None:
    box, told = Outbox(), [(4, 3, 2, 1), (5, 1, 0, 0), (4, 7, 7, 1)]
    for request_id, *numbers in told:
        box.drafted.append(request_id)
        box.drafts += numbers
    assert box.num_bytes >= 11 * len(told)
    box.times.append(SequenceTimes(4))
    output = message(box)
    assert isinstance(output, DetailedOutput) and [*read_drafts(output)] == told and output.times == [SequenceTimes(4)]
    assert type(message(box)) is StepOutput


def test_more_tokens_than_one_count_can_hold_are_split() -> None:
    box = Outbox()
    box.request_ids = [7] * 70_000
    box.tokens = list(range(70_000))
    assert [token for _, run in runs(message(box)) for token in run] == list(range(70_000))
