"""Faults of a service of several frontends, each with what it costs the clients."""

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from msgspec import Struct

from benchmarks.frontends.hostile import HostileClients
from tandem.frontend.cli.bench.distribution import percentile
from tests.fakes.scripted_engine import DEFAULT_MODEL, POISON_SEED, POISON_TOKENS, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import Serving
from tests.support.stream_client import Stream, StreamClient, Summary, answer, completion, summary

ENDLESS, ENDLESS_REAL = 1900, 900
"""Tokens of a stream that is still open when its fault comes, from a scripted engine and from a real one."""
BEFORE_SECONDS, AFTER_SECONDS = 3.0, 8.0
"""Times before and after a fault in which the gaps between tokens of the other streams are compared."""
WAIT_SECONDS = 120.0
WHOLE = 10
"""Requests whose replies are sent whole, so that none of them has output when the fault comes."""


class Setup(Struct, frozen=True):
    """Size of one measurement."""

    streams: int
    frontends: int
    tokens_per_second: float
    """Of each stream, from a scripted engine."""
    real: tuple[str, ...] | None = None
    """Flags of `tandem serve` with a real engine; None for a scripted one."""

    @property
    def endless(self) -> int:
        """Tokens of a stream that is still open when its fault comes."""
        return ENDLESS if self.real is None else ENDLESS_REAL


class Outcome(Struct, frozen=True):
    """Cost of one fault."""

    fault: str
    streams: int
    goal: str
    seconds: dict[str, float]
    counts: dict[str, float]
    leaked_rows: float
    leaked_pages: float


class Drill:
    """One server with its streams, at the moment of a fault."""

    def __init__(self, serving: Serving, client: StreamClient, setup: Setup) -> None:
        self.serving = serving
        self.client = client
        self.setup = setup
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.streams: list[Stream] = []
        self._at = 0.0

    def load(self, tokens: int = 0) -> list[Stream]:
        """Open the streams, endless ones by default, and wait until each has had a token."""
        self.streams = self.client.open(completion(tokens or self.setup.endless), self.setup.streams)
        self.client.until_streaming(self.streams, WAIT_SECONDS)
        assert all(not stream.outcome for stream in self.streams), summary(self.streams)
        return self.streams

    def strike(self, act: Callable[[], object]) -> None:
        """Do the damage, and count seconds from here."""
        self._at = time.monotonic()
        act()

    def note(self, name: str, condition: Callable[[], object]) -> None:
        """Note the seconds from the fault until a condition holds.

        It is asked ten times a second.
        """
        asked = 0.0

        def holds() -> bool:
            nonlocal asked
            if time.monotonic() - asked < 0.1:
                return False
            asked = time.monotonic()
            return bool(condition())

        self.client.until(holds, name, WAIT_SECONDS)
        self.seconds[name] = round(time.monotonic() - self._at, 3)

    def note_ends(self, streams: Sequence[Stream], name: str = "last stream told") -> None:
        """Note when the last of these streams ended."""
        self.client.until_ended(streams, WAIT_SECONDS)
        self.seconds[name] = round(max(stream.ended for stream in streams) - self._at, 3)

    def count(self, streams: Sequence[Stream], what: str) -> None:
        """Count these streams by their outcome; none may have lost or repeated a token."""
        found = Summary.of(streams)
        assert not found.problems, summary(streams)
        self.counts |= {
            f"{what}: {name}": number
            for name, number in (("done", found.done), ("error", found.error), ("cut", found.cut), ("open", found.open))
            if number
        }

    def note_gaps(self) -> None:
        """Note the 99th percentile of the gaps between tokens before and after.

        They are those of the streams that are still open.
        """
        living = [stream for stream in self.streams if not stream.outcome]
        before = _gaps(living, self._at - BEFORE_SECONDS, self._at)
        after = _gaps(living, self._at, self._at + AFTER_SECONDS)
        if before and after:
            self.seconds["ITL p99 before"] = round(percentile(before, 99), 4)
            self.seconds["ITL p99 after"] = round(percentile(after, 99), 4)

    def is_whole(self) -> bool:
        """Return whether every frontend runs and the service is ready."""
        return self.serving.num_serving() == self.setup.frontends and self.is_ready()

    def is_ready(self) -> bool:
        return answer(self.serving.address, "/health/ready")[0] == 200

    def outcome(self, fault: str, goal: str) -> Outcome:
        """Let every client go, and see what stays behind."""
        for stream in self.client.streams:
            self.client.drop(stream)
        deadline = time.monotonic() + 10
        while not (free := self.serving.rows_and_pages_are_free()) and time.monotonic() < deadline:
            time.sleep(0.1)
        share = self.serving.engine_metric("tandem_kv_cache_usage_perc")
        pages = 0.0 if free else share * self.serving.engine_metric("tandem_kv_cache_pages")
        rows = self.serving.engine_metric("tandem_num_requests_running")
        return Outcome(fault, self.setup.streams, goal, self.seconds, self.counts, rows, round(pages))


def _gaps(streams: Sequence[Stream], since: float, until: float) -> list[float]:
    gaps = []
    for stream in streams:
        times = [at for at in stream.arrivals if since <= at <= until]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return sorted(gaps)


def every_token(drill: Drill) -> Outcome:
    """Count the tokens of streams that run to their end at the same time."""
    tokens = round(20 * drill.setup.tokens_per_second)
    streams = drill.load(tokens)
    drill.strike(lambda: None)
    drill.note_ends(streams, "all streams ended")
    drill.count(streams, "streams")
    drill.counts["tokens missing or too many"] = sum(abs(stream.num_tokens - tokens) for stream in streams)
    return drill.outcome("none: every token arrives once", "0 missing")


def _engine(drill: Drill, signum: signal.Signals, fault: str, goal: str) -> Outcome:
    streams = drill.load()
    tokens = max(10, round(6 * drill.setup.tokens_per_second))
    whole = drill.client.open(completion(tokens, stream=False), WHOLE)
    rows = drill.setup.streams + WHOLE
    drill.note("a row for each", lambda: drill.serving.engine_metric("tandem_num_requests_running") == rows)
    drill.seconds.clear()
    engine = drill.serving.engine
    drill.strike(lambda: engine.send_signal(signum))
    drill.note_ends(streams)
    drill.note("engine gone", lambda: not engine.is_running())
    drill.note("ready again", drill.is_ready)
    drill.note_ends(whole, "requests without output answered")
    drill.count(streams, "streams")
    drill.count(whole, "without output")
    return drill.outcome(fault, goal)


def killed_engine(drill: Drill) -> Outcome:
    """Kill the engine."""
    goal = "told in 0.1 s with 100, 1 s with 2,000; those without output done; ready in the start time + 1 s"
    return _engine(drill, signal.SIGKILL, "kill -9 engine", goal)


def stopped_engine(drill: Drill) -> Outcome:
    """Stop the engine without ending it."""
    return _engine(drill, signal.SIGSTOP, "SIGSTOP engine", "told in 6 s, killed at 8 s; those without output done")


def _frontend(drill: Drill, signum: signal.Signals, fault: str, goal: str) -> Outcome:
    streams = drill.load()
    drill.client.run(BEFORE_SECONDS)
    lost = drill.serving.frontends()[0]
    drill.strike(lambda: lost.send_signal(signum))
    others: list[Stream] = []
    asked = 0.0

    def ask() -> None:
        nonlocal asked, others
        if time.monotonic() - asked > 0.5:
            asked = time.monotonic()
            others += drill.client.open(completion(2), 5)

    def gone() -> bool:
        ask()
        return not lost.is_running()

    def freed() -> bool:
        ask()
        return _rows(drill) < len(
            streams
        )  # none of them ends by itself, and the rows of one frontend are freed at once

    drill.note("rows free", freed)
    drill.client.until(gone, "the end of the frontend", WAIT_SECONDS)
    drill.seconds["frontend gone"] = round(time.monotonic() - drill._at, 3)
    drill.client.until(
        lambda: _rows(drill) <= sum(not s.outcome for s in (*streams, *others)), "rows of living clients", WAIT_SECONDS
    )
    drill.note("all frontends", drill.is_whole)
    drill.client.run(max(0.0, drill._at + AFTER_SECONDS - time.monotonic()))
    drill.client.until_ended(others, WAIT_SECONDS)
    drill.seconds["slowest new request"] = round(max(s.ended - s.opened for s in others), 3)
    drill.note_gaps()
    drill.count(streams, "streams")
    drill.count(others, "new requests")
    return drill.outcome(fault, goal)


def _rows(drill: Drill) -> float:
    return drill.serving.engine_metric("tandem_num_requests_running")


def killed_frontend(drill: Drill) -> Outcome:
    """Kill one frontend of several."""
    return _frontend(drill, signal.SIGKILL, "kill -9 a frontend", "rows free in 1 s; no new request refused")


def stopped_frontend(drill: Drill) -> Outcome:
    """Stop one frontend of several without ending it."""
    return _frontend(drill, signal.SIGSTOP, "SIGSTOP a frontend", "rows free in 6 s; ITL p99 of the others 1.5 times")


def _restart(drill: Drill, frontends: Sequence[psutil.Process], fault: str) -> Outcome:
    tokens = max(2, round(drill.setup.tokens_per_second))
    loaded: list[Stream] = []
    refilled = 0.0

    def refill() -> None:
        nonlocal refilled
        if time.monotonic() - refilled > 0.1:
            refilled = time.monotonic()
            missing = drill.setup.streams - drill.client.num_open
            loaded.extend(drill.client.open(completion(tokens), max(0, missing)))

    def replaced(left: psutil.Process) -> bool:
        refill()
        return not left.is_running() and drill.serving.num_serving() == drill.setup.frontends

    refill()
    drill.client.run(BEFORE_SECONDS)
    drill.strike(lambda: None)
    for left in frontends:
        left.terminate()
        drill.client.until(lambda left=left: replaced(left), "a successor", WAIT_SECONDS)  # type: ignore[misc]
    drill.seconds["replaced"] = round(time.monotonic() - drill._at, 3)
    drill.client.until_ended(loaded, WAIT_SECONDS)
    drill.count(loaded, "requests")
    return drill.outcome(fault, "0 requests lost or refused")


def ended_frontend(drill: Drill) -> Outcome:
    """Ask one frontend to end, under load."""
    return _restart(drill, drill.serving.frontends()[:1], "SIGTERM a frontend under load")


def rolling_restart(drill: Drill) -> Outcome:
    """Ask all frontends to end, one after the other, under load."""
    return _restart(drill, drill.serving.frontends(), "SIGTERM all frontends in turn under load")


def killed_supervisor(drill: Drill) -> Outcome:
    """Kill the supervisor and start the same command again."""
    streams = drill.load()
    process = drill.serving.process
    assert process is not None
    drill.strike(process.kill)
    process.wait(WAIT_SECONDS)
    drill.note_ends(streams)
    drill.serving.__enter__()
    drill.note("ready again", drill.is_whole)
    drill.count(streams, "streams")
    return drill.outcome("supervisor killed and started again", "binds the same ports; nothing is left of the first")


def unreadable_config(drill: Drill) -> Outcome:
    """Let the engine restart on a model folder that cannot be read, then mend it."""
    config = drill.serving.log.parent / "tandem-default" / "config.json"
    whole = config.read_text()
    config.write_text(whole[:100])
    engine = drill.serving.engine
    drill.strike(engine.kill)
    drill.note("said so", lambda: drill.serving.said("config.json cannot be read"))
    drill.counts["alive"] = answer(drill.serving.address, "/health/live")[0]
    config.write_text(whole)
    drill._at = time.monotonic()
    drill.note("ready after it was mended", drill.is_ready)
    return drill.outcome("config unreadable at an engine's restart", "the service stays, and serves once it is mended")


def poison(drill: Drill) -> Outcome:
    """Send a request that kills the engine."""
    before = drill.serving.engine_metric("tandem_engine_restarts_total")
    poisonous: list[Stream] = []
    body = completion(2 * POISON_TOKENS, stream=False, seed=POISON_SEED)
    drill.strike(lambda: poisonous.extend(drill.client.open(body)))
    drill.note_ends(poisonous, "refused")
    drill.counts["its status"] = poisonous[0].status
    drill.note("ready again", drill.is_ready)
    drill.counts["engines killed"] = drill.serving.engine_metric("tandem_engine_restarts_total") - before
    return drill.outcome("a request that kills the engine", "two engines at most")


def hostile_clients(drill: Drill) -> Outcome:
    """Hold idle connections and readers that never read, and let many leave at once."""
    setup, address = drill.setup, drill.serving.address
    streams = drill.load()
    before = _memory(drill)
    with HostileClients(address, setup.endless, setup.real is None) as hostile:
        drill.client.until(hostile.is_settled, "the hostile clients", 2 * WAIT_SECONDS)
        drill.counts["refused of 2,000"] = hostile.refused()
        drill.client.run(BEFORE_SECONDS)
        drill.strike(hostile.leave)
        drill.client.run(AFTER_SECONDS)
        drill.seconds["/health/live, slowest"] = round(max(hostile.live()), 3)
        drill.counts["MiB grown"] = round(_memory(drill) - before, 1)
        drill.note_gaps()
        drill.count(streams, "streams")
    return drill.outcome("3,000 idle, 200 never read, 2,000 leave", "ITL p99 doubled at most; live in 0.5 s")


def _memory(drill: Drill) -> float:
    """Return the resident memory of all frontends in MiB."""
    return sum(process.memory_info().rss for process in drill.serving.frontends()) / 2**20


SCRIPTED_ONLY = ("every-token", "unreadable-config", "poison")
"""Faults that need a scripted engine."""
FAULTS: dict[str, Callable[[Drill], Outcome]] = {
    "every-token": every_token,
    "kill-engine": killed_engine,
    "stop-engine": stopped_engine,
    "kill-frontend": killed_frontend,
    "stop-frontend": stopped_frontend,
    "end-frontend": ended_frontend,
    "rolling-restart": rolling_restart,
    "kill-supervisor": killed_supervisor,
    "unreadable-config": unreadable_config,
    "poison": poison,
    "hostile-clients": hostile_clients,
}


def measure(name: str, setup: Setup, folder: Path) -> Outcome:
    """Start a server for one fault, and measure what the fault costs."""
    flags = ("--frontends", str(setup.frontends), "--max-concurrent", "8192", "--max-queued-tokens", "1000000")
    flags += ("--max-waiting", "8192", "--log-level", "warning")
    serving: Serving
    if setup.real is None:
        script = Script(tokens_per_second=setup.tokens_per_second)
        serving = ScriptedServing(folder / "log", "--model", str(_model(folder)), *flags, script=script)
    else:
        serving = Serving(folder / "log", *flags, *setup.real)
    with serving, StreamClient(serving.address, records=True, has_letters=setup.real is None) as client:
        drill = Drill(serving, client, setup)
        client.until(drill.is_whole, "all frontends", WAIT_SECONDS)
        return FAULTS[name](drill)


def _model(folder: Path) -> Path:
    """Make a model folder that a fault may break."""
    model = folder / "tandem-default"
    model.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / file, model)
    return model
