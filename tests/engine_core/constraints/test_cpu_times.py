"""CPU time of a grammar as another thread reads it."""

import threading
import time

from tandem.engine_core.constraints.cpu_times import CpuTimes


def test_time_of_a_thread_counts_while_its_grammar_is_compiled() -> None:
    times = CpuTimes()
    begun, ended, leave = threading.Event(), threading.Event(), threading.Event()

    def compile_grammar() -> None:
        times.begin("a")
        while time.thread_time() < 0.02:
            pass
        begun.set()
        assert ended.wait(30)
        times.end("a")
        begun.set()
        assert leave.wait(30)

    thread = threading.Thread(target=compile_grammar)
    assert times.seconds("a") == 0
    thread.start()
    assert begun.wait(30)
    begun.clear()
    assert times.seconds("a") > 0.01
    assert times.seconds("b") == 0
    ended.set()
    assert begun.wait(30)
    assert times.seconds("a") == 0
    leave.set()
    thread.join()
