"""The wait for libzmq's threads."""

import threading
from pathlib import Path

import pytest
import zmq

from tandem.engine_core.wire import io_threads
from tandem.engine_core.wire.io_threads import await_idle_threads, thread_states


def test_what_was_sent_has_left_after_the_wait(tmp_path: Path) -> None:
    endpoint, is_done = f"ipc://{tmp_path}/socket", threading.Event()

    def keep_busy() -> None:
        while not is_done.is_set():
            sum(range(1000))

    with zmq.Context() as ours, zmq.Context() as theirs, ours.socket(zmq.PAIR) as sender:
        sender.bind(endpoint)
        with theirs.socket(zmq.PAIR) as receiver:
            receiver.connect(endpoint)
            sender.send(b"connected")
            assert receiver.recv() == b"connected"
            threads = [threading.Thread(target=keep_busy) for _ in range(1)]
            for thread in threads:
                thread.start()
            try:
                for number in range(10):
                    sender.send(b"%d" % number)
                    await_idle_threads(30.0)  # for the one that sends
                    await_idle_threads(30.0)  # and for the one that it has woken, which receives
                    assert receiver.recv(zmq.DONTWAIT) == b"%d" % number
            finally:
                is_done.set()
                for thread in threads:
                    thread.join()
            assert len(thread_states()) == 2


def test_a_process_without_such_threads_waits_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(io_threads, "thread_states", list)
    monkeypatch.setattr(io_threads.time, "sleep", waited.append)
    await_idle_threads(1.0)
    assert waited == [0.02]
