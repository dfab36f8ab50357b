"""Priority and number of the threads of a lane."""

import os
import threading

import pytest

from tandem.engine_core.constraints.compile_lane import CompileLane


@pytest.mark.parametrize("niceness", [0, 10, 100])
def test_only_the_threads_of_a_lane_have_its_priority(niceness: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    lane = CompileLane("lane", 1, niceness=niceness)
    found = lane.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert found == min(before + niceness, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    lane.close()


def test_a_grammar_is_set_aside_once_and_only_for_a_spare_thread() -> None:
    lane = CompileLane("lane", 1, spare_threads=1)
    for grammar in "abcd":
        lane.add("", grammar)
    assert (lane.take(), lane.take()) == ("a", None)
    lane.set_aside("a")
    lane.set_aside("a")
    assert (lane.take(), lane.take()) == ("b", None)
    lane.set_aside("b")
    assert lane.take() is None
    lane.end("a")
    assert lane.take() is None, "the thread that took its place goes on"
    lane.end("b")
    assert (lane.take(), lane.take()) == ("c", None)
    lane.close()
