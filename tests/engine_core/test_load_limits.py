"""Load limits over all frontends: refusals, their messages and counters."""

import pytest
from msgspec import structs

from tandem.engine_core.control import Control
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort, Hello, Submit
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.model import VOCAB
from tests.support.recorded_engine import EPOCH, Bench
from tests.support.refusals import numbers_in


@pytest.fixture
def control() -> Control:
    control = Bench(2, pages=200).control
    for client in (b"a", b"b"):
        control.apply(client, Hello(PROTOCOL_VERSION, EPOCH, "test"))
    control.limits = structs.replace(control.limits, max_concurrent=4, max_queued_tokens=9)
    return control


def ask(control: Control, client: bytes, number: int, tokens: int = 1, group: int = 0) -> str:
    """Submit a prompt of this many tokens; return the refusal, "" for none."""
    answer = control.apply(client, Submit(number, pack_ids([5] * tokens), SamplingParams(4), group=group))
    if answer is None:
        return ""
    assert isinstance(answer, Failure) and (answer.request_id, answer.code) == (number, ErrorCode.OVERLOADED)
    return answer.message


def test_sequences_of_all_frontends_share_one_limit(control: Control) -> None:
    assert [ask(control, client, number) for number in (1, 2) for client in (b"a", b"b")] == [""] * 4
    for client in (b"a", b"b"):
        refused = ask(control, client, 3)
        assert numbers_in(refused) == [4, 4] and "(--max-concurrent)" in refused
    control.apply(b"b", Abort([2]))
    assert ask(control, b"a", 4) == ""
    assert control.stats.requests_failed == {"overloaded": 2}


def test_prompts_without_output_share_one_limit(control: Control) -> None:
    assert ask(control, b"a", 1, 5) == ""
    refused = ask(control, b"b", 1, 5)
    assert numbers_in(refused) == [5, 5, 9] and "(--max-queued-tokens)" in refused
    assert ask(control, b"b", 2, 4) == ""
    assert ask(control, b"a", 2, 1) != ""


def test_prompt_of_any_length_is_taken_while_no_other_waits(control: Control) -> None:
    assert ask(control, b"a", 1, 20) == ""
    assert numbers_in(ask(control, b"a", 2, 1))[:2] == [20, 1]
    control.apply(b"a", Abort([1]))
    assert ask(control, b"b", 3, 20) == ""


def test_group_of_any_length_is_taken_while_no_other_prompt_waits(control: Control) -> None:
    assert [ask(control, b"a", number, 20, group=1) for number in (1, 2)] == ["", ""]
    assert numbers_in(ask(control, b"a", 3, 1, group=3))[:2] == [40, 1]
    assert numbers_in(ask(control, b"b", 4, 1, group=1))[:2] == [40, 1], "of its own"
    control.apply(b"a", Abort([1, 2]))
    assert ask(control, b"b", 5, 5) == ""
    assert [bool(ask(control, b"a", number, 4, group=6)) for number in (6, 7)] == [False, True]


def test_invalid_request_is_not_counted_as_load(control: Control) -> None:
    for number in range(1, 9):
        answer = control.apply(b"a", Submit(number, pack_ids([VOCAB]), SamplingParams(4)))
        assert isinstance(answer, Failure) and answer.code is ErrorCode.INVALID_VALUE
    assert ask(control, b"a", 9, 9) == ""


def test_rest_of_a_group_is_refused_with_its_first_refusal_which_counts_once(control: Control) -> None:
    assert ask(control, b"b", 1) == ask(control, b"b", 2) == ""
    assert [ask(control, b"a", number, group=1) for number in (1, 2)] == ["", ""]
    refusal = ask(control, b"a", 3, group=1)
    assert refusal
    control.apply(b"b", Abort([1, 2]))
    assert ask(control, b"a", 4, group=1) == refusal, "there is room again, but not for a part of a request"
    assert control.stats.requests_failed == {"overloaded": 1}
    assert ask(control, b"a", 5, group=5) == "", "another request of the same frontend"
    assert ask(control, b"b", 3, group=1) == "", "groups are numbered by each frontend"


def test_requests_without_a_group_are_judged_one_by_one(control: Control) -> None:
    assert ask(control, b"a", 1, 9) == ""
    assert ask(control, b"a", 2) and ask(control, b"a", 3)
    control.apply(b"a", Abort([1]))
    assert ask(control, b"a", 4) == ""
    assert control.stats.requests_failed == {"overloaded": 2}


def test_choices_wait_with_one_prompt(control: Control) -> None:
    def choose(number: int, choice: int, group: int, tokens: int) -> Failure | None:
        params = SamplingParams(4, choice=choice)
        answer = control.apply(b"a", Submit(number, pack_ids([5] * tokens), params, group=group))
        assert answer is None or isinstance(answer, Failure)
        return answer

    assert [choose(number, number - 1, 1, 5) for number in (1, 2, 3)] == [None] * 3
    assert control.scheduler.queued.num_tokens == 5
    assert choose(4, 0, 4, 4) is None
    assert control.scheduler.queued.num_tokens == 9, "as many as may wait"
    control.apply(b"a", Abort([1, 2, 3, 4]))
    assert control.scheduler.queued.num_tokens == 0
