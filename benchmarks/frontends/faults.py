"""Faults of a service with several frontends, and their effect on clients."""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.frontends.drill import AFTER_SECONDS, BEFORE_SECONDS, WAIT_SECONDS, Drill, Outcome, Setup
from benchmarks.frontends.hostile import HostileClients
from benchmarks.frontends.malformed import NUM_MESSAGES, MalformedSender
from tests.fakes.scripted_engine import DEFAULT_MODEL, POISON_SEED, POISON_TOKENS, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import Serving
from tests.support.stream_client import Stream, StreamClient, answer, completion

WHOLE = 10
"""Requests without streaming, which have no output yet when the fault comes."""


def every_token(drill: Drill) -> Outcome:
    """Count the tokens of streams that run to completion concurrently."""
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
    drill.await_rows(drill.setup.streams + WHOLE)
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
    """Suspend the engine with SIGSTOP."""
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
        return _rows(drill) < len(streams)  # none ends by itself, and all rows of a frontend are freed together

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
    """Kill one of several frontends."""
    return _frontend(drill, signal.SIGKILL, "kill -9 a frontend", "rows free in 1 s; no new request refused")


def stopped_frontend(drill: Drill) -> Outcome:
    """Suspend one of several frontends with SIGSTOP."""
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
    """Terminate one frontend under load."""
    return _restart(drill, drill.serving.frontends()[:1], "SIGTERM a frontend under load")


def rolling_restart(drill: Drill) -> Outcome:
    """Terminate all frontends under load, one after the other."""
    return _restart(drill, drill.serving.frontends(), "SIGTERM all frontends in turn under load")


def killed_supervisor(drill: Drill) -> Outcome:
    """Kill the supervisor and rerun the same command."""
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
    """Restart the engine on an unreadable model folder, then repair the folder."""
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

    def restarts() -> float:
        return drill.serving.engine_metric("tandem_engine_restarts_total") - before

    poisonous: list[Stream] = []
    body = completion(2 * POISON_TOKENS, stream=False, seed=POISON_SEED)
    drill.strike(lambda: poisonous.extend(drill.client.open(body)))
    drill.note_ends(poisonous, "refused")
    drill.counts["its status"] = poisonous[0].status
    drill.client.until(lambda: restarts() >= 2, "a third engine", WAIT_SECONDS)
    drill.note("ready again", drill.is_ready)
    drill.counts["engines killed"] = restarts()
    return drill.outcome("a request that kills the engine", "two engines at most")


def hostile_clients(drill: Drill) -> Outcome:
    """Hold idle connections and readers that never read, and close many streams at once."""
    setup, address = drill.setup, drill.serving.address
    streams = drill.load()
    before = _memory(drill)
    drill.client.run(BEFORE_SECONDS)
    hostile = HostileClients(address, setup.endless, setup.real is None)
    with ExitStack() as stack:
        drill.strike(lambda: stack.enter_context(hostile))
        drill.client.until(hostile.is_settled, "the hostile clients", 2 * WAIT_SECONDS)
        drill.counts["refused of 2,000"] = hostile.refused()
        drill.client.run(BEFORE_SECONDS)
        hostile.leave()
        drill.client.run(AFTER_SECONDS)
        drill.seconds["/health/live, slowest"] = round(max(hostile.live()), 3)
        drill.counts["MiB grown"] = round(_memory(drill) - before, 1)
        drill.note_gaps()
        drill.count(streams, "streams")
    return drill.outcome("3,000 idle, 200 never read, 2,000 leave", "ITL p99 doubled at most; live in 0.5 s")


def malformed_messages(drill: Drill) -> Outcome:
    """Send malformed messages to the engine."""
    streams = drill.load()
    drill.client.run(BEFORE_SECONDS)
    engine = drill.serving.engine
    before = engine.memory_info().rss
    with MalformedSender(drill.setup.endpoint(drill.serving.log.parent)) as sender:
        drill.strike(sender.start)
        drill.note(f"{NUM_MESSAGES:,} messages read", sender.has_ended)
        drill.counts["its exit code"] = sender.exit_code
    assert engine.is_running()
    drill.counts["MiB grown"] = round((engine.memory_info().rss - before) / 2**20, 1)
    drill.counts["KiB of log"] = round(drill.serving.log.stat().st_size / 2**10, 1)
    drill.note_gaps()
    drill.count(streams, "streams")
    return drill.outcome("100,000 malformed messages", "no crash, no leak, others unaffected, the log bounded")


def _memory(drill: Drill) -> float:
    """Return the resident memory of all frontends, in MiB."""
    return sum(process.memory_info().rss for process in drill.serving.frontends()) / 2**20


SCRIPTED_ONLY = ("every-token", "unreadable-config", "poison")
"""Faults that require a scripted engine."""
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
    "malformed-messages": malformed_messages,
}


def measure(name: str, setup: Setup, folder: Path) -> Outcome:
    """Start a server, and measure the effect of a fault."""
    flags = ("--frontends", str(setup.frontends), "--max-concurrent", "8192", "--max-queued-tokens", "1000000")
    flags += ("--max-waiting", "8192", "--log-level", "warning", "--endpoint", setup.endpoint(folder))
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
    """Make a model folder that a fault can corrupt."""
    model = folder / "tandem-default"
    model.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / file, model)
    return model
