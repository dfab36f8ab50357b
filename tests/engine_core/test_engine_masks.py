"""Order of the loop's calls where a step waits for its masks, and an advancer that others may help."""

from collections.abc import Sequence, Set
from random import Random

import pytest

from tandem.engine_core.contracts import ArrivingTokens, MaskedRows, StepResult
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.commit import SchedulerUpdates
from tandem.protocol.commands import Abort
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tests.fakes.constraint import FakeAdvancer, FakeConstraint
from tests.fakes.model import reference
from tests.support.effort import EFFORT
from tests.support.recorded_engine import CLIENT, Bench

WAITS, ALONE = "start least+1", "start least"
"""Calls of the advancer where another step waits for these tokens, and where none does."""


class RecordingAdvancer(FakeAdvancer):
    """Fake advancer that records its calls together with the runtime's."""

    def __init__(self, bench: Bench, is_remote: bool) -> None:
        super().__init__(is_remote=is_remote)
        self.bench = bench
        self.rows: list[list[int]] = []
        """Rows of each call of `start_accept`."""

    def accept_on_arrival(self, masks: MaskedRows, arriving: ArrivingTokens) -> bool:
        self.bench.runtime.calls.append("arrival")
        return super().accept_on_arrival(masks, arriving)

    def start_accept(self, masks: MaskedRows, tokens: Sequence[int], least: int) -> None:
        more = least - self.bench.scheduler.min_jump
        self.bench.runtime.calls.append({0: ALONE, 1: WAITS}.get(more, f"start least+{more}"))
        self.rows.append([row for row, _ in masks])
        super().start_accept(masks, tokens, least)

    def finish_accept(self) -> Set[int]:
        self.bench.runtime.calls.append("finish")
        return super().finish_accept()


def recorded(depth: int, is_remote: bool, rows: int = 4) -> tuple[Bench, RecordingAdvancer]:
    """Return an engine that records the calls of runtime and advancer, drains and commits."""
    bench = Bench(depth, rows)
    calls, commit = bench.runtime.calls, bench.scheduler.commit

    def record(plan: StepPlan, result: StepResult, advanced: Set[int] = frozenset()) -> SchedulerUpdates:
        calls.append(f"commit {plan.step_id}")
        return commit(plan, result, advanced)

    bench.scheduler.commit = record  # type: ignore[method-assign]
    bench.mailbox.on_drain = lambda: calls.append("drain")
    bench.engine.advancer = bench.advancer = advancer = RecordingAdvancer(bench, is_remote)
    return bench, advancer


@pytest.mark.parametrize("is_remote", [False, True])
def test_commands_are_read_between_the_tokens_and_their_commit(is_remote: bool) -> None:
    """Masks are prefetched only if worker processes compute them."""
    prefetched = {step: ["arrival", f"prefetch masks {step}"] if is_remote else ["arrival"] for step in (2, 3)}
    bench, _ = recorded(2, is_remote)
    bench.submit(1, 3, "parity")
    assert [bench.tick_calls() for _ in range(5)] == [
        ["drain", "launch 1"],
        ["drain", "stage 2", "sample 1", "launch 2", *prefetched[2]],
        ["collect 1", WAITS, "drain", "finish", "commit 1", "stage 3", "sample 2", "launch 3", *prefetched[3]],
        ["collect 2", WAITS, "drain", "finish", "commit 2", "sample 3", "collect 3", ALONE, "finish", "commit 3"],
        ["drain"],
    ]


def test_depth_one_prefetches_no_masks() -> None:
    """No step waits for the tokens of another."""
    bench, _ = recorded(1, is_remote=True)
    bench.submit(1, 2, "parity")
    assert [bench.tick_calls() for _ in range(3)] == [
        ["drain", "launch 1"],
        ["drain", "sample 1", "collect 1", ALONE, "finish", "commit 1", "launch 2"],
        ["drain", "sample 2", "collect 2", ALONE, "finish", "commit 2"],
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_without_masks_are_committed_without_the_advancer(depth: int) -> None:
    bench, advancer = recorded(depth, is_remote=True)
    bench.submit(1, 4)
    bench.finish()
    assert advancer.rows == [] and "finish" not in bench.runtime.calls


def test_step_without_masks_before_one_that_waits_for_them() -> None:
    """Its tokens need no grammar; they are still collected before commands are read."""
    bench, advancer = recorded(2, is_remote=True)
    bench.submit(1, 8)
    assert bench.tick_calls() == ["drain", "launch 1", "sample 1"]
    bench.submit(2, 2, "parity")
    assert bench.tick_calls() == ["drain", "launch 2"]
    assert bench.tick_calls() == [
        "collect 1", "drain", "commit 1", "stage 3", "sample 2", "launch 3", "arrival", "prefetch masks 3"
    ]  # fmt: skip
    assert advancer.rows == []
    assert bench.tick_calls()[:3] == ["collect 2", WAITS, "drain"]


def test_least_is_that_of_the_rows_that_run() -> None:
    """Both with few rows, where one forced token is worth a jump, and with many."""
    least: set[int] = set()
    for others in (0, 7, 15):
        bench, advancer = recorded(2, is_remote=True, rows=20)
        for number in range(others):
            bench.submit(number, 6)
        bench.submit(100, 6, "parity")
        for _ in range(6):
            assert not [
                call for call in bench.tick_calls() if call.startswith("start l") and call not in (WAITS, ALONE)
            ]
            least.add(advancer.least)
    assert {2, 3, 5} <= least


def test_a_failed_row_is_no_concern_of_the_others() -> None:
    """They are accepted together, and masks are prefetched."""
    bench, advancer = recorded(2, is_remote=True)
    bench.runtime.breaks = lambda row: row.seq_id == failing
    bench.submit(1, 6, "parity")
    bench.submit(2, 6, "parity")
    failing = 2
    bench.engine.tick()
    failing = max(bench.scheduler.running)
    bench.engine.tick()
    calls = bench.tick_calls()
    assert calls[:3] == ["collect 1", WAITS, "drain"] and len(advancer.rows[0]) == 2
    assert advancer.num_advanced == 1
    bench.finish()
    assert bench.mailbox.received[CLIENT, 1] == reference([3, 4, 5], 6, frozenset(), 0, FakeConstraint("parity"))
    assert bench.mailbox.received[CLIENT, 2] == [] and bench.at_rest()


def test_an_abort_between_collect_and_commit_ends_its_request_once() -> None:
    """The step's token for it is not sent; its neighbour gets all of its own."""
    bench, advancer = recorded(2, is_remote=True)
    for request_id in (1, 2):
        bench.submit(request_id, 6, "parity")
    for _ in range(2):
        bench.engine.tick()
    bench.say(Abort([1]))
    assert bench.tick_calls()[:3] == ["collect 1", WAITS, "drain"]
    assert bench.outcome(1) == Finished(1, FinishReason.ABORT)
    assert len(advancer.rows[0]) == 2 and bench.mailbox.received[CLIENT, 1] == []
    assert len(bench.mailbox.received[CLIENT, 2]) == 1
    bench.finish()
    assert bench.mailbox.received[CLIENT, 2] == reference([3, 4, 5], 6, frozenset(), 0, FakeConstraint("parity"))
    assert bench.stats.zombie_rows == 2 and bench.at_rest()


class Arrivals:
    """Commands that arrive between a step's tokens and their commit, or where the engine has nothing to do."""

    def __init__(self, bench: Bench, random: Random) -> None:
        self.bench = bench
        self.random = random
        self.asked: dict[int, tuple[int, str | None]] = {}
        """Most tokens and grammar of each request."""
        self.aborted: set[int] = set()
        self.num_between = 0

    def arrive(self) -> None:
        bench, random = self.bench, self.random
        if bench.advancer.started is None and bench.scheduler.num_open:
            return
        self.num_between += bench.advancer.started is not None
        if self.asked and random.random() < 0.3:
            self.aborted.update(ids := random.sample(sorted(self.asked), min(len(self.asked), 2)))
            bench.say(Abort(ids))
        for number in range(len(self.asked), min(len(self.asked) + 3, 30)):
            grammar = random.choice([None, "parity", "parity", "runs 2", "stops 4"])
            self.asked[number] = random.randrange(1, 14), grammar
            bench.submit(number, *self.asked[number])


@pytest.mark.parametrize("is_remote", [False, True])
def test_nothing_is_lost_where_commands_arrive_between_collect_and_commit(is_remote: bool) -> None:
    num_between = num_aborted = 0
    for seed in range(12 * EFFORT):
        random, (bench, advancer) = Random(seed), recorded(2, is_remote, rows=6)
        advancer.advances = lambda random=random: random.random() < 0.8
        arrivals = Arrivals(bench, random)
        bench.mailbox.on_drain = arrivals.arrive
        while len(arrivals.asked) < 30:
            bench.engine.tick()
            assert advancer.started is None, "a tick that ended before its commit"
        bench.finish()
        for number, (max_tokens, grammar) in arrivals.asked.items():
            constraint = None if grammar is None else FakeConstraint(grammar)
            expected = reference([3, 4, 5], max_tokens, frozenset(), 0, constraint)
            received, outcome = bench.mailbox.received[CLIENT, number], bench.outcome(number)
            if outcome == Finished(number, FinishReason.ABORT):
                assert number in arrivals.aborted and received == expected[: len(received)]
                num_aborted += 1
            else:
                assert isinstance(outcome, Finished) and received == expected
        assert bench.at_rest() and bench.scheduler.audit() == []
        num_between += arrivals.num_between
    assert num_between > 60 and num_aborted > 10
