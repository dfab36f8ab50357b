"""Runs of a plan's measurements, one after the other, within a time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.campaign.plan import Group, Measurement
from benchmarks.matrix.server import ServerDiedError
from benchmarks.measuring import results
from benchmarks.measuring.processes import CUT_OFF

PATIENCE = 2
"""Times its planned seconds after which a measurement is stopped."""
LAST_LINES = 12

Places = dict[str, str]
Serve = Callable[[Group], AbstractContextManager[Places]]


class Run(Struct, frozen=True):
    """Outcome of one measurement."""

    name: str
    outcome: str
    """`done`, `failed`, `stopped` (it took too long), or `left out` (there was no time)."""
    seconds: float
    planned: int
    git: str
    tail: str = ""
    """Last lines that it printed."""


class Runner:
    """Run measurements and keep what they print and save."""

    def __init__(self, out: Path, deadline: float, serve: Serve, say: Callable[[str], None]) -> None:
        """Keep the parts of a runner.

        out: folder for logs, copies of results and `runs.jsonl`; deadline: on the monotonic clock, in seconds; serve:
        makes a group's folder and server, which live as long as its context.
        """
        self._out, self._deadline, self._serve, self._say = out, deadline, serve, say
        self._git = str(results.origin()["git"])

    @property
    def runs_file(self) -> Path:
        """File with a line for each run, to which a later campaign adds."""
        return self._out / "runs.jsonl"

    def done(self) -> set[str]:
        """Return the names of the measurements that earlier runs completed.

        A line that was cut off is left out.
        """
        done = set()
        for line in self.runs_file.read_bytes().splitlines() if self.runs_file.exists() else ():
            with suppress(msgspec.DecodeError):
                run = msgspec.json.decode(line, type=Run)
                if run.outcome == "done":
                    done.add(run.name)
        return done

    def run(self, groups: Iterable[Group]) -> list[Run]:
        """Run what fits into the time, in order; the rest is left out."""
        runs: list[Run] = []
        for group in groups:
            shortest = min(one.seconds for one in group.measurement)
            if self._left() < group.start_seconds + shortest:
                runs += [self._ended(one, "left out", 0.0) for one in group.measurement]
                continue
            try:
                with self._serve(group) as places:
                    runs += [self._measure(one, places) for one in group.measurement]
            except ServerDiedError as error:
                self._say(str(error))
                known = {run.name for run in runs}
                runs += [self._ended(one, "failed", 0.0, str(error)) for one in group.measurement
                         if one.name not in known]  # fmt: skip
        return runs

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _measure(self, one: Measurement, places: Places) -> Run:
        if self._left() < one.seconds:
            return self._ended(one, "left out", 0.0)
        log = self._out / f"{one.name}.log"
        began = time.monotonic()
        saved = results.RESULTS / f"{one.name}.json"
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        with log.open("wb") as sink:
            command = [sys.executable, "-m", *one.arguments({**places, "out": str(self._out)})]
            child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = child.wait(min(PATIENCE * one.seconds, max(1.0, self._left())))
                outcome = {0: "done", CUT_OFF: "stopped"}.get(code, "failed")
            except subprocess.TimeoutExpired:
                outcome = "stopped"
            finally:
                _stop(child)
        if saved.exists() and saved.stat().st_mtime_ns > before:
            shutil.copy(saved, self._out)
        lines = log.read_text(errors="replace").splitlines()
        return self._ended(one, outcome, time.monotonic() - began, "\n".join(lines[-LAST_LINES:]))

    def _ended(self, one: Measurement, outcome: str, seconds: float, tail: str = "") -> Run:
        run = Run(one.name, outcome, round(seconds, 1), one.seconds, self._git, tail)
        was_cut_off = self.runs_file.exists() and not self.runs_file.read_bytes().endswith(b"\n")
        with self.runs_file.open("ab") as file:
            file.write(b"\n" * was_cut_off + msgspec.json.encode(run) + b"\n")
        self._say(f"{run.name}: {run.outcome}, {run.seconds:.0f} of {run.planned} s\n{tail}")
        return run


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """Kill a command and what it started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
