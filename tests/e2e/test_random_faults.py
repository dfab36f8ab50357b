"""Random faults of all processes under random requests: every request ends, and only a lost frontend cuts any."""

import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from tandem.frontend.api.admin.pause import NEW_REQUESTS
from tandem.protocol.commands import PAUSE_MODES
from tests.fakes.scripted_engine import Script
from tests.support.scraper import Scraper
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import until
from tests.support.stream_client import Stream, StreamClient, completion, summary

pytestmark = pytest.mark.slow

FRONTENDS = 3
DEADLINE = 15
FLAGS = (
    *("--frontends", str(FRONTENDS), "--beat-timeout", "3", "--hang-timeout", "5", "--hold-timeout", "10"),
    *("--request-timeout", str(DEADLINE), "--drain-timeout", "6", "--send-timeout", "3"),
)
SECONDS = 30.0
TURN_SECONDS, TURNS_PER_FAULT = 0.25, 5
MOST_OPEN = 150


def post(serving: ScriptedServing, path: str) -> int:
    """Return the status of a call; 0 if its frontend is killed meanwhile."""
    with suppress(OSError, HTTPException):
        return serving.post(path, {})[0]
    return 0


class Faults:
    """What happens to a service, drawn from one seed."""

    def __init__(self, seed: int, serving: ScriptedServing, client: StreamClient) -> None:
        self.seen: list[str] = []
        self.doomed: set[int] = set()
        """Ports of clients whose frontend was killed or stopped."""
        self._rng = random.Random(seed)
        self._serving = serving
        self._client = client
        self._ports: dict[Stream, int] = {}
        self._stopped: dict[int, float] = {}
        """Time at which each process that is stopped goes on."""
        self._threads: list[threading.Thread] = []

    def cut(self) -> list[Stream]:
        """Return the streams that ended without a word although their frontend lives."""
        return [s for s, port in self._ports.items() if s.outcome == "cut" and port not in self.doomed]

    def open(self) -> None:
        """Open some requests of one kind, or have some clients leave."""
        rng, client = self._rng, self._client
        tokens, streams = rng.choice((1, rng.randint(2, 120), 2000)), rng.random() < 0.6
        for stream in client.open(completion(tokens, stream=streams), rng.randint(1, 12)):
            assert stream.sock is not None
            self._ports[stream] = stream.sock.getsockname()[1]
        living = [stream for stream in client.streams if not stream.outcome]
        if rng.random() < 0.2:
            for stream in rng.sample(living, min(len(living), 8)):
                client.drop(stream)
                stream.outcome = "left"

    def happen(self) -> None:
        """Do one thing to one process."""
        fault = self._rng.choice((self._lose_frontend, self._end_frontend, self._lose_engine, self._pause))
        try:
            fault()
        except (psutil.Error, AssertionError, IndexError, OSError):  # there is no such process at the moment
            self.seen.append("nothing")

    def go_on(self, everything: bool = False) -> None:
        """Have stopped processes go on whose time has come, or all."""
        for pid, at in list(self._stopped.items()):
            if everything or time.monotonic() > at:
                del self._stopped[pid]
                if psutil.pid_exists(pid):
                    psutil.Process(pid).send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Let the service come to rest."""
        self.go_on(everything=True)
        for thread in self._threads:
            thread.join()

    def _stop_or_kill(self, process: psutil.Process, what: str) -> None:
        process.suspend()
        if self._rng.random() < 0.5:
            process.kill()
            self.seen.append(f"{what} killed")
        else:
            self._stopped[process.pid] = time.monotonic() + self._rng.uniform(0.2, 7.0)
            self.seen.append(f"{what} stopped")

    def _frontend(self) -> psutil.Process:
        return self._rng.choice([f for f in self._serving.frontends() if f.pid not in self._stopped])

    def _lose_frontend(self) -> None:
        frontend = self._frontend()
        frontend.suspend()
        until(lambda: frontend.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE), "its stop")
        connections = frontend.net_connections("tcp")
        self.doomed |= {c.raddr.port for c in connections if c.raddr and c.laddr.port == self._serving.port}
        self._stop_or_kill(frontend, "frontend")

    def _end_frontend(self) -> None:
        self._frontend().terminate()
        self.seen.append("frontend told to end")

    def _lose_engine(self) -> None:
        self._stop_or_kill(self._serving.engine, "engine")

    def _call(self, path: str, wait: float) -> None:
        time.sleep(wait)
        self.seen.append(f"{path} {post(self._serving, path)}")

    def _pause(self) -> None:
        mode, new = self._rng.choice(PAUSE_MODES), self._rng.choice(NEW_REQUESTS)
        seconds = self._rng.uniform(0.0, 1.5)

        for path, wait in ((f"/admin/pause?mode={mode}&new_requests={new}", 0.0), ("/admin/resume", seconds)):
            self._threads.append(threading.Thread(target=self._call, args=(path, wait), name=path))
            self._threads[-1].start()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ScriptedServing]:
    script = Script(tokens_per_second=40.0, load_seconds=0.5)
    with ScriptedServing(tmp_path / "log", *FLAGS, script=script) as running:
        until(lambda: running.num_serving() == FRONTENDS, "all frontends")
        yield running


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_and_nothing_leaks(serving: ScriptedServing, seed: int) -> None:
    with serving.clients() as client, Scraper(serving.port, serving.ops_port) as scraper:
        scraper.losing = {serving.port}
        faults = Faults(seed, serving, client)
        end = time.monotonic() + SECONDS
        for turn in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
            if client.num_open < MOST_OPEN:
                faults.open()
            client.run(TURN_SECONDS)
            faults.go_on()
            if turn % TURNS_PER_FAULT == 0:
                faults.happen()
        faults.end()
        until(lambda: post(serving, "/admin/resume") == 200, "an engine that runs")
        client.until_ended([stream for stream in client.streams if not stream.outcome], 4 * DEADLINE)
        assert not faults.cut(), f"{summary(faults.cut())} after {faults.seen}"
        assert not any(stream.problem for stream in client.streams), summary(client.streams)
        until(lambda: serving.num_serving() == FRONTENDS and serving.ready(), "all processes")
        until(serving.rows_and_pages_are_free, "no rows and pages in use")
    assert not serving.said("Traceback"), faults.seen
