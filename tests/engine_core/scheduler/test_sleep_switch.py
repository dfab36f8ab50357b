"""States of sleep: all sequences of a few calls, against a table."""

import itertools

import pytest

from tandem.engine_core.errors import SleepError
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch, problem_of
from tandem.protocol.commands import SLEEP_TAGS, Sleep, WakeUp
from tandem.protocol.events import Answer, WeightFacts
from tests.fakes.sleep_memory import FakeSleepMemory

CLIENT = b"c"
BOTH = frozenset(SLEEP_TAGS)
W, K = frozenset({"weights"}), frozenset({"kv_cache"})
NONE: frozenset[str] = frozenset()
CALLS = {
    "sleep 1": Sleep(1, 1),
    "sleep 2": Sleep(1, 2),
    "wake": WakeUp(1),
    "wake both": WakeUp(1, ["weights", "kv_cache"]),
    "wake weights": WakeUp(1, ["weights"]),
    "wake cache": WakeUp(1, ["kv_cache"]),
}
State = tuple[frozenset[str], str]
"""Tags asleep; the weights: complete, copied (asleep, with a copy), dropped (asleep without one, or undefined)."""
TABLE: dict[tuple[frozenset[str], str], dict[str, State]] = {
    (NONE, "complete"): {"sleep 1": (BOTH, "copied"), "sleep 2": (BOTH, "dropped")},
    (BOTH, "copied"): {
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake weights": (K, "complete"),
        "wake cache": (W, "copied"),
    },
    (BOTH, "dropped"): {
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake weights": (K, "dropped"),
        "wake cache": (W, "dropped"),
    },
    (K, "complete"): {
        "sleep 1": (BOTH, "copied"),
        "sleep 2": (BOTH, "dropped"),
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake cache": (NONE, "complete"),
    },
    (K, "dropped"): {
        "sleep 1": (BOTH, "dropped"),
        "sleep 2": (BOTH, "dropped"),
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake cache": (NONE, "dropped"),
    },
    (W, "copied"): {
        "sleep 1": (BOTH, "copied"),
        "sleep 2": (BOTH, "copied"),
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake weights": (NONE, "complete"),
    },
    (W, "dropped"): {
        "sleep 1": (BOTH, "dropped"),
        "sleep 2": (BOTH, "dropped"),
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
        "wake weights": (NONE, "dropped"),
    },
    (NONE, "dropped"): {
        "sleep 1": (BOTH, "dropped"),
        "sleep 2": (BOTH, "dropped"),
        "wake": (NONE, "complete"),
        "wake both": (NONE, "complete"),
    },
}
"""The state after each call; a call that is not listed changes nothing."""


class Machine:
    """A switch, driven as the loop drives it."""

    def __init__(self) -> None:
        self.memory = FakeSleepMemory()
        self.switch = SleepSwitch(self.memory)

    def do(self, name: str) -> Answer:
        command = CALLS[name]
        if isinstance(command, Sleep):
            self.switch.begin(CLIENT, command)
        else:
            self.switch.begin_wake(CLIENT, command)
        if self.switch.is_due(0, 0):
            self.switch.fall_asleep()
        self.switch.wake()
        ((_, answer),) = self.switch.take_replies()
        assert isinstance(answer, Answer)
        return answer

    @property
    def state(self) -> State:
        switch, memory = self.switch, self.memory
        assert memory.awake == SLEEP_TAGS - switch.asleep
        assert switch.holds_rows == switch.refuses_new == bool(switch.asleep)
        if "weights" in switch.asleep:
            return switch.asleep, "copied" if memory.has_copy else "dropped"
        assert switch.has_dropped_weights == (memory.contents == "undefined")
        return switch.asleep, "dropped" if switch.has_dropped_weights else "complete"


def test_table_covers_every_state_and_call() -> None:
    reached = {state for after in TABLE.values() for state in after.values()} | {(NONE, "complete")}
    assert reached == set(TABLE)


@pytest.mark.parametrize("length", [4])
def test_every_sequence_of_calls_follows_the_table(length: int) -> None:
    for names in itertools.product(CALLS, repeat=length):
        machine = Machine()
        state: State = (NONE, "complete")
        for name in names:
            assert machine.do(name).ok, names
            state = TABLE[state].get(name, state)
            assert machine.state == state, names


@pytest.mark.parametrize("names", list(itertools.product(CALLS, repeat=2)))
@pytest.mark.parametrize("fault", ["release", "restore", "reload"])
def test_a_failed_call_changes_nothing_and_can_be_repeated(names: tuple[str, ...], fault: str) -> None:
    for last in CALLS:
        machine = Machine()
        for name in names:
            machine.do(name)
        before = machine.state
        machine.memory.faults[fault] = SleepError("2 bytes are needed, 1 is free", is_lack=True)
        answer = machine.do(last)
        if answer.ok:
            assert fault in machine.memory.faults
            continue
        assert answer.lacks_memory and "2" in answer.message
        assert machine.state == before
        assert machine.do(last).ok
        assert machine.state == TABLE[before].get(last, before)


def test_without_a_folder_dropped_weights_stay_incomplete() -> None:
    machine = Machine()
    machine.memory.is_on_disk = False
    machine.do("sleep 2")
    machine.do("wake")
    assert machine.state == (NONE, "dropped")
    machine.switch.note_filled()
    machine.memory.contents = "disk"
    assert machine.state == (NONE, "complete")


def test_modes_decide_what_a_sleep_waits_for() -> None:
    for mode, due in (("abort", [True, True, False]), ("keep", [True, True, False]), ("wait", [True, False, False])):
        switch = SleepSwitch(FakeSleepMemory())
        assert switch.begin(CLIENT, Sleep(1, 1, mode))  # type: ignore[arg-type]
        assert [switch.is_due(0, 0), switch.is_due(0, 3), switch.is_due(1, 0)] == due
        assert switch.refuses_new and switch.holds_rows == (mode != "wait")


def test_a_later_sleep_changes_the_one_that_is_due_and_a_wake_cancels_it() -> None:
    switch = SleepSwitch(FakeSleepMemory())
    switch.begin(CLIENT, Sleep(1, 1, "wait"))
    switch.begin(CLIENT, Sleep(2, 2, "abort"))
    assert switch.is_due(0, 5)
    switch.begin_wake(CLIENT, WakeUp(3))
    assert switch.due is None and not switch.refuses_new
    switch.wake()
    answers = [answer for _, answer in switch.take_replies() if isinstance(answer, Answer)]
    assert [(answer.call, answer.ok) for answer in answers] == [(1, False), (2, False), (3, True)]


def test_facts_say_what_sleeps() -> None:
    machine = Machine()
    awake = WeightFacts("v", "ready")
    assert machine.switch.facts(awake) == awake
    machine.do("sleep 1")
    assert machine.switch.facts(awake) == WeightFacts("v", "sleeping", "", ["kv_cache", "weights"])
    machine.do("wake cache")
    assert machine.switch.facts(awake) == WeightFacts("v", "sleeping", "", ["weights"])
    machine.switch.is_changing = True
    assert machine.switch.facts(awake).state == "changing"


def test_facts_say_that_a_sleep_is_due() -> None:
    switch, awake = Machine().switch, WeightFacts("v", "ready")
    switch.begin(b"client", Sleep(1, 1, "wait"))
    assert switch.facts(awake) == WeightFacts("v", "ready", is_sleep_due=True)
    switch.begin_wake(b"client", WakeUp(2))
    assert switch.facts(awake) == awake


@pytest.mark.parametrize("command", [Sleep(1, 0), Sleep(1, 3), Sleep(1, -1), WakeUp(1, ["weights", "graphs"])])
def test_unknown_levels_and_tags_are_refused(command: Sleep | WakeUp) -> None:
    assert problem_of(command)


@pytest.mark.parametrize("command", CALLS.values(), ids=CALLS)
def test_known_ones_are_not(command: Sleep | WakeUp) -> None:
    assert not problem_of(command)
