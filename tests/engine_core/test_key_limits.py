"""Limits of API keys over all frontends: what is refused, what is counted, what is forgotten."""

import re
from array import array
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.control import Control
from tandem.engine_core.key_limits import KeyLimits
from tandem.engine_core.sequence import Sequence
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort, EndSession, Hello, Inspect, KeyClaim, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Answer, Failure, Finished, Inspection
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.support.recorded_engine import EPOCH, Bench
from tests.support.refusals import numbers_in


@pytest.fixture
def control() -> Control:
    control = Bench(2, pages=200).control
    for client in (b"a", b"b"):
        control.apply(client, Hello(PROTOCOL_VERSION, EPOCH, "test"))
    return control


def claim(name: str = "alice", concurrent: int = 0, tokens: int = 0, count: int = 1, prompt: int = 1) -> KeyClaim:
    return KeyClaim(name, concurrent, tokens, count, prompt)


def ask(
    control: Control, client: bytes, number: int, key: KeyClaim | None, group: int = 0, choice: int = 0, lost: int = 0
) -> Failure | None:
    """Submit a prompt with the number of tokens in the key's claim."""
    prompt = pack_ids([5] * (key.prompt_tokens if key else 1))
    params = SamplingParams(4, choice=choice)
    answer = control.apply(client, Submit(number, prompt, params, group=group, lost_engines=lost, key=key))
    assert answer is None or isinstance(answer, Failure)
    return answer


def test_sequences_of_one_key_share_a_limit_over_all_frontends(control: Control) -> None:
    key = claim(concurrent=2)
    assert ask(control, b"a", 1, key) is ask(control, b"b", 1, key) is None
    refused = ask(control, b"a", 2, key)
    assert refused is not None and (refused.request_id, refused.code) == (2, ErrorCode.RATE_LIMITED)
    assert "'alice'" in refused.message and "(max_concurrent)" in refused.message
    assert numbers_in(refused.message) == [2, 1, 2]
    for other in (claim("bob", concurrent=2), claim("carol"), None):
        assert ask(control, b"a", 3 + len(other.name if other else ""), other) is None
    control.apply(b"b", Abort([1]))
    assert ask(control, b"a", 20, key) is None


def test_a_group_is_accepted_or_refused_as_a_whole_and_counts_one_refusal(control: Control) -> None:
    key = claim(concurrent=3, count=2)
    assert [ask(control, b"a", number, key, group=1) for number in (1, 2)] == [None, None]
    refusals = [ask(control, b"a", number, key, group=3) for number in (3, 4)]
    assert [refusal and refusal.request_id for refusal in refusals] == [3, 4]
    assert control.stats.requests_failed == {"rate_limit_exceeded": 1}
    assert control.scheduler.num_open == 2


def test_tokens_of_a_minute_are_refused_with_the_seconds_until_they_are_there(control: Control) -> None:
    key = claim(tokens=60, prompt=40)
    assert ask(control, b"a", 1, key) is None
    refused = ask(control, b"b", 1, key)
    assert refused is not None and (refused.code, refused.retry_after) == (ErrorCode.RATE_LIMITED, 61)
    assert "'alice'" in refused.message and "(tokens_per_minute)" in refused.message
    assert numbers_in(refused.message) == [20, 60, 40, 61]
    assert ask(control, b"b", 2, claim("bob", tokens=60, prompt=40)) is None
    usage = control.key_limits.pop_usage_update()
    assert usage is not None and (usage.name, usage.limit_tokens, usage.remaining_tokens) == ("bob", 60, 20)
    assert usage.reset_tokens == pytest.approx(61)
    assert control.key_limits.pop_usage_update() is None


def test_choices_of_one_prompt_count_it_once(control: Control) -> None:
    key = claim(tokens=100, count=3, prompt=40)
    assert [ask(control, b"a", 1 + choice, key, group=1, choice=choice) for choice in range(3)] == [None] * 3
    assert control.key_limits.accounts["alice"].left == 60


def test_prompt_that_was_never_computed_is_given_back(control: Control) -> None:
    key = claim(tokens=60, prompt=40)
    assert ask(control, b"a", 1, key) is None
    control.apply(b"a", Abort([1]))
    assert ask(control, b"a", 2, key) is None


def test_request_that_lost_its_engine_is_neither_refused_nor_counted_again(control: Control) -> None:
    key = claim(concurrent=1, tokens=60, prompt=60)
    assert ask(control, b"a", 1, key) is None
    assert ask(control, b"b", 1, key, lost=1) is None
    assert control.key_limits.accounts["alice"].left == 0
    assert ask(control, b"b", 2, key) is not None


def test_changed_limits_hold_for_the_next_request_and_keep_what_was_used(control: Control) -> None:
    assert ask(control, b"a", 1, claim(tokens=50, prompt=40)) is None
    assert ask(control, b"a", 2, claim(tokens=25, prompt=5)) is not None
    assert ask(control, b"a", 3, claim(tokens=100, prompt=55)) is None


def test_sessions_and_salts_of_two_keys_never_meet(control: Control) -> None:
    salts = set()
    for number, name in enumerate(("alice", "bob", ""), 1):
        key = KeyClaim(name) if name else None
        command = Submit(number, pack_ids([5]), SamplingParams(4), session="s", cache_salt="x", key=key)
        assert control.apply(b"a", command) is None
    for number, (name, shares, salt) in enumerate(
        (("alice", False, ""), ("bob", False, ""), ("alice", True, ""), ("alice", True, "x")), 10
    ):
        key = KeyClaim(name, shares_cache=shares)
        control.apply(b"a", Submit(number, pack_ids([5]), SamplingParams(4), cache_salt=salt, key=key))
        salts.add(control.scheduler._open[b"a", number].cache.namespace)
    assert salts == {b"\0alice\0", b"\0bob\0", b"", b"\0alice\0x"}
    shown = control.apply(b"a", Inspect(1))
    assert isinstance(shown, Inspection)
    assert [(session.name, session.key) for session in shown.sessions] == [("s", "alice"), ("s", "bob"), ("s", "")]
    assert {(seq.session, seq.key) for seq in shown.sequences} >= {("s", "alice"), ("s", "bob"), ("s", "")}
    ended = control.apply(b"a", EndSession(2, "s", "carol"))
    assert isinstance(ended, Answer) and (ended.call, ended.ok) == (2, False) and "'s'" in ended.message
    assert control.apply(b"a", EndSession(3, "s", "bob")) == Answer(3, True)


class Traffic:
    """Sequences of one key, each with one more token per step, and an exact account of them."""

    def __init__(self, limit: int) -> None:
        self.clock = FakeClock()
        self.limits = KeyLimits(self.clock)
        self.limit = limit
        self.times: list[float] = []
        """When tokens were spent, in order."""
        self.sums = [0]
        """Tokens that had been spent before each of these times, and all of them."""
        self.open: list[Sequence] = []

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.limits.advance(self.clock())

    def step(self) -> None:
        for seq in list(self.open):
            seq.tokens.append(5)
            self.spend(1)
            if len(seq.tokens) >= seq.total_len:
                seq.outcome = Finished(seq.request_id, FinishReason.LENGTH)
                self.open.remove(seq)

    def ask(self, number: int, prompt: int, output: int) -> bool:
        key = claim(tokens=self.limit, prompt=prompt)
        if self.limits.refusal(key, True) is not None:
            return False
        submit = Submit(number, b"", SamplingParams(output), key=key)
        seq = Sequence(number, b"a", submit, array("i", [5] * prompt), frozenset())
        seq.wire.reported_cached = 0
        self.limits.begin(key, seq)
        self.open.append(seq)
        self.spend(prompt)
        return True

    def spend(self, tokens: int) -> None:
        self.times.append(self.clock())
        self.sums.append(self.sums[-1] + tokens)

    def last(self, seconds: float) -> int:
        """Return the tokens of the last seconds."""
        return self.sums[-1] - self.sums[bisect_right(self.times, self.clock() - seconds)]


@given(
    st.integers(60, 5000),
    st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 60), st.integers(1, 50)), min_size=1, max_size=60),
)
def test_tokens_of_the_last_minute_are_those_of_an_exact_account(
    limit: int, requests: list[tuple[float, int, int]]
) -> None:
    traffic = Traffic(limit)
    for number, (seconds, prompt, output) in enumerate(requests, 1):
        traffic.step()
        traffic.pass_time(seconds)
        taken = traffic.ask(number, min(prompt, limit), output)
        if taken:
            assert traffic.last(60) <= limit
        if (account := traffic.limits.accounts.get("alice")) is not None:
            account.roll_forward(traffic.clock())
            # Outputs count when they are seen, up to 2 s later, and a second counts as a whole.
            assert traffic.last(60) <= account.used <= traffic.last(61 + 2.0)


@pytest.mark.parametrize(("limit", "output"), [(1200, 10), (2400, 40)])
def test_greedy_key_gets_its_tokens_a_minute_within_a_tenth(limit: int, output: int) -> None:
    traffic, number, minutes = Traffic(limit), 0, 12
    most = 0
    for _ in range(minutes * 600):
        traffic.pass_time(0.1)
        traffic.step()
        while len(traffic.open) < 4 and traffic.ask(number := number + 1, 20, output):
            pass
        most = max(most, traffic.last(60))
    assert most <= 1.1 * limit
    assert traffic.sums[-1] == pytest.approx(limit * minutes, rel=0.1)


def test_prompt_that_fits_but_for_tokens_just_generated_is_refused() -> None:
    traffic = Traffic(60)
    traffic.pass_time(1.0)
    assert traffic.ask(1, 30, 5)
    traffic.step()
    traffic.pass_time(0.125)
    assert not traffic.ask(2, 30, 1), "30 and 1 of the 60 tokens are spent"
    assert traffic.ask(2, 29, 1)
    assert traffic.last(60) == 60


def test_tokens_are_free_again_when_the_seconds_that_they_were_spent_in_are_over() -> None:
    traffic = Traffic(100)
    for number, seconds in enumerate((0.5, 10, 10), 1):
        traffic.pass_time(seconds)
        assert traffic.ask(number, 30, 1)
    refusal = traffic.limits.refusal(claim(tokens=100, prompt=40), True)
    assert refusal is not None and refusal[1] == 41, "the first 30 tokens are free 61 s after they were spent"
    traffic.pass_time(40.5)
    assert traffic.limits.refusal(claim(tokens=100, prompt=40), True) is None


def test_idle_keys_are_forgotten() -> None:
    traffic = Traffic(60)
    assert traffic.ask(1, 30, 5)
    for _ in range(5):
        traffic.pass_time(0.5)
        traffic.step()
    assert traffic.limits.accounts.keys() == {"alice"}
    for _ in range(130):
        traffic.pass_time(0.5)
    assert traffic.limits.accounts == {}


def test_wait_for_a_slot_counts_the_time_that_the_ended_sequences_took() -> None:
    traffic, key = Traffic(0), claim(concurrent=2)

    def fill(number: int) -> None:
        for choice in range(2):
            submit = Submit(number + choice, b"", SamplingParams(4), key=key)
            seq = Sequence(number + choice, b"a", submit, array("i", [5]), frozenset())
            traffic.limits.begin(key, seq)
            traffic.open.append(seq)

    fill(1)
    traffic.pass_time(20)
    for seq in traffic.open:
        seq.outcome = Finished(seq.request_id, FinishReason.LENGTH)
    traffic.pass_time(1)
    fill(3)
    refusal = traffic.limits.refusal(key, True)
    assert refusal is not None and refusal[1] == 11, "two ended in 21 s, however short ago that was"
    news = traffic.limits.pop_usage_update()
    assert news is not None and (news.remaining_requests, news.reset_requests) == (0, 21.0), "both of those in progress"


def test_idle_time_of_a_key_is_not_taken_for_the_time_of_its_sequences() -> None:
    traffic, key = Traffic(0), claim(concurrent=1)
    for number in (1, 2):
        submit = Submit(number, b"", SamplingParams(4), key=key)
        seq = Sequence(number, b"a", submit, array("i", [5]), frozenset())
        traffic.limits.begin(key, seq)
        if number == 1:
            traffic.pass_time(2)
            seq.outcome = Finished(number, FinishReason.LENGTH)
            traffic.pass_time(1)
            traffic.pass_time(40)
    refusal = traffic.limits.refusal(key, True)
    assert refusal is not None and refusal[1] == 3, "the first was seen to end 3 s after its start"
    news = traffic.limits.pop_usage_update()
    assert news is not None and (news.remaining_requests, news.reset_requests) == (0, 3.0)


def test_time_until_a_key_s_sequences_have_ended_is_unknown_before_the_first_has() -> None:
    traffic, key = Traffic(0), claim(concurrent=2)
    traffic.limits.begin(
        key, Sequence(1, b"a", Submit(1, b"", SamplingParams(4), key=key), array("i", [5]), frozenset())
    )
    news = traffic.limits.pop_usage_update()
    assert news is not None and (news.remaining_requests, news.reset_requests) == (1, None)


def test_wait_for_a_slot_follows_from_how_fast_the_key_ends_sequences() -> None:
    clock = FakeClock()
    limits, key = KeyLimits(clock), claim(concurrent=4)
    running: list[Sequence] = []

    def begin(number: int) -> None:
        submit = Submit(number, b"", SamplingParams(4), key=key)
        running.append(Sequence(number, b"a", submit, array("i", [5]), frozenset()))
        limits.begin(key, running[-1])

    def refusal(size: int) -> tuple[str, int]:
        found = limits.refusal(claim(concurrent=4, count=size), True)
        assert found is not None
        return found

    for number in range(4):
        begin(number)
    message, seconds = refusal(1)
    assert seconds == 0 and re.search(r"\b4 \(max_concurrent\);", message)
    for number in range(4, 14):  # one ends every 3 s
        clock.advance(3)
        running.pop(0).outcome = Finished(0, FinishReason.LENGTH)
        limits.advance(clock())
        begin(number)
    message, seconds = refusal(2)
    assert 5 <= seconds <= 6 and numbers_in(message)[-1] == seconds
    assert refusal(1)[1] == 3
    clock.advance(100)
    limits.advance(clock())
    assert refusal(1)[1] == 0
    for seq in running:
        seq.outcome = Finished(seq.request_id, FinishReason.LENGTH)
    clock.advance(1)
    limits.advance(clock())
    assert limits.accounts  # its ends are remembered
    clock.advance(100)
    limits.advance(clock())
    assert not limits.accounts


@pytest.mark.parametrize("aborts", [False, True])
def test_requests_one_after_another_have_all_slots_but_their_own(aborts: bool) -> None:
    """A sequence frees its concurrency slot when its end is sent, before the account rolls forward."""
    bench, key = Bench(2, pages=200), claim(concurrent=2)
    bench.control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "test"))
    for number in range(1, 5):
        assert ask(bench.control, b"a", number, key) is None
        news = bench.control.key_limits.pop_usage_update()
        assert news is not None and news.remaining_requests == 1
        if aborts:
            bench.engine.tick()
            bench.control.apply(b"a", Abort([number]))
        while not bench.at_rest():
            bench.engine.tick()
    account = bench.control.key_limits.accounts["alice"]
    account.roll_forward(bench.clock())
    assert (len(account.open), account._num_ended) == (0, 0)
