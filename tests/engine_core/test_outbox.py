"""What waits for one frontend: in order, complete, in one message."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.outbox import Outbox
from protocol.codec import decode_event, encode, runs
from protocol.errors import ErrorCode, FinishReason
from protocol.events import Failure, Finished, StepOutput


def test_a_new_one_is_empty() -> None:
    box = Outbox()
    assert not box
    assert box.message(3) == StepOutput(3, b"", b"", b"")


def test_terminal_events_alone_make_a_message() -> None:
    for name, outcome in (
        ("finished", Finished(1, FinishReason.STOP, 5)),
        ("failures", Failure(1, ErrorCode.OVERLOADED, "x")),
    ):
        box = Outbox()
        getattr(box, name).append(outcome)
        assert box
        assert getattr(box.message(1), name) == [outcome]
        box.clear()
        assert not box


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=60))
def test_tokens_of_many_steps_in_one_message(told: list[tuple[int, int]]) -> None:
    box = Outbox()
    for request_id, token in told:
        box.request_ids.append(request_id)
        box.tokens.append(token)
    output = decode_event(encode(box.message(9)))
    assert isinstance(output, StepOutput)
    received = [(request_id, token) for request_id, run in runs(output) for token in run]
    assert received == told


def test_a_message_is_a_copy() -> None:
    box = Outbox()
    box.finished.append(Finished(1, FinishReason.LENGTH))
    message = box.message(1)
    box.clear()
    assert message.finished == [Finished(1, FinishReason.LENGTH)]


def test_more_tokens_than_one_count_can_hold() -> None:
    box = Outbox()
    box.request_ids = [7] * 70_000
    box.tokens = list(range(70_000))
    assert [token for _, run in runs(box.message(1)) for token in run] == list(range(70_000))
