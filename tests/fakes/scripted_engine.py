"""An engine core whose model is a script: `python -m tests.fakes.scripted_engine FLAGS`.

Process, sockets, heartbeats, commands, scheduler and the bookkeeping of rows and pages are the real ones; only the
model is not. Every sequence gets the same words, one for each capital letter, again and again, so that a client counts
tokens by their letters, and sees whether one is missing or came twice. What it cannot know from its flags it reads from
the environment variable TANDEM_SCRIPT, a `Script` in JSON.
"""

import hashlib
import math
import os
import re
import runpy
import signal
import sys
import time
from array import array
from pathlib import Path
from string import ascii_uppercase
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from tandem.engine_core import control
from tandem.engine_core.contracts import ArrivingTokens, DeviceTimes, Mailbox, MaskedRows, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.wire.heartbeat import Status
from tandem.engine_core.wire.leases import Leases
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Limits, ModelFacts, Phase
from tandem.protocol.model_folder import template_fingerprint
from tests.fakes.constraint import FakeAdvancer, FakeCompiler

ROOT = Path(__file__).parents[2]
DEFAULT_MODEL = ROOT / "engine_core" / "default_model"
VARIABLE = "TANDEM_SCRIPT"
POISON_SEED, EARLY_POISON_SEED = 666_666, 666_667
POISON_TOKENS = 20
POISONS = {POISON_SEED: POISON_TOKENS, EARLY_POISON_SEED: 0}
"""Seeds of requests that kill the engine with SIGKILL, each with the number of its tokens after which it does.

With 0 it does in its first launch, and may take the announcement of the request along: libzmq sends from a thread of
its own."""
MAX_ROWS, PAGE_SIZE, PAGES_PER_ROW = 4096, 16, 128
"""Rows and KV pages of an engine whose flags do not state them."""
MAX_STEP_TOKENS = 2**20
DEPTH = 1
"""Steps in flight: as on a CPU, the loop waits for each step."""


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """Behaviour of a scripted engine."""

    tokens_per_second: float = 50.0
    """Tokens of each stream; all running streams get one in each step. 0: as fast as the loop runs."""
    load_seconds: float = 0.0
    """Time from the start of the process to its readiness, besides the imports."""
    journal: str = ""
    """File in which the engine keeps a `Journal` when it is asked to end; "" for none."""
    protocol_version: int | None = None
    """Version that the engine speaks, without leases, for the frontends of another commit; None for its own."""

    @classmethod
    def from_environment(cls) -> "Script":
        return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=cls)

    def environment(self) -> dict[str, str]:
        """Return the variable that gives a child process this script."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


class Journal(Struct):
    """What a scripted engine sent, and when."""

    sent: list[float]
    """Monotonic seconds at which the output of each step was sent, by the number of the step, from 1 on."""
    first: dict[str, list[int]]
    """Steps that yielded the first token of each sequence, by the id of its HTTP request."""
    arrived: dict[str, list[float]]
    """Monotonic seconds at which the engine took each of those sequences."""

    def write(self, path: Path) -> None:
        """Write a file that is whole as soon as it exists."""
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(self))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Journal":
        return msgspec.json.decode(path.read_bytes(), type=cls)


class ScriptedRuntime:
    """Implements `contracts.Runtime` without a device: the next token of a sequence follows from its position."""

    def __init__(self, words: list[int]) -> None:
        self._words = words
        self._prompt_lens: dict[int, int] = {}
        """Length of the prompt by row."""
        self._poisoned: dict[int, int] = {}
        """Rows of requests that kill the engine, each with the number of tokens after which it does."""
        self._results: dict[int, StepResult] = {}

    def _die_of(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.end - self._prompt_lens[row.row] >= self._poisoned.get(row.row, math.inf):
                os.kill(os.getpid(), signal.SIGKILL)

    def launch(self, slot: int, plan: StepPlan) -> None:
        for new in plan.admitted:
            self._prompt_lens[new.row] = new.prompt_len
            self._poisoned.pop(new.row, None)
            if new.params.seed in POISONS:
                self._poisoned[new.row] = POISONS[new.params.seed]
        if self._poisoned:
            self._die_of(plan)
        words, lens, period = self._words, self._prompt_lens, len(self._words)
        if plan.is_decode_only:
            tokens = [words[(row.start + 1 - lens[row.row]) % period] for row in plan.rows]
            self._results[slot] = StepResult([1] * len(tokens), tokens)
            return
        sampled = [row for row in plan.rows if row.samples]
        tokens = [words[(row.end - lens[row.row]) % period] for row in sampled]
        self._results[slot] = StepResult([int(row.samples) for row in plan.rows], tokens)

    def stage(self, slot: int, plan: StepPlan) -> None:
        return None

    def arriving_tokens(self, slot: int, masks: MaskedRows) -> ArrivingTokens:
        raise AssertionError("a step without grammars")

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        return None

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        return None

    def collect(self, slot: int) -> StepResult:
        return self._results.pop(slot)

    def synchronize(self) -> None:
        return None

    def device_times(self) -> DeviceTimes:
        return DeviceTimes()


class ScriptedEngine(Engine):
    """The engine's loop with steps of the durations in the script."""

    script = Script()
    due = 0.0
    """Time at which the step in flight ends, by the monotonic clock."""
    sent: "array[float]"
    first: dict[str, list[int]]
    arrived: dict[str, list[float]]

    def run(self) -> None:
        self.sent, self.first, self.arrived = array("d"), {}, {}
        try:
            super().run()
        finally:
            if self.script.journal:
                Journal(list(self.sent), self.first, self.arrived).write(Path(self.script.journal))

    def _launch(self, plan: StepPlan) -> None:
        if self.script.journal:
            for new in plan.admitted:
                seq = self.scheduler.running[new.seq_id]
                self.first.setdefault(seq.submit.http_request_id, []).append(plan.step_id)
                self.arrived.setdefault(seq.submit.http_request_id, []).append(seq.arrival)
        if self.script.tokens_per_second:
            self.due = max(self.due, time.monotonic()) + 1 / self.script.tokens_per_second
        super()._launch(plan)

    def _commit_oldest(self) -> None:
        while (left := self.due - time.monotonic()) > 0 and not self.stopping:
            if left < 0.01:
                time.sleep(left)  # finer than the mailbox waits
            else:
                self.mailbox.wait(left)
                self._drain()
        super()._commit_oldest()
        if self.script.journal:
            self.sent.append(time.monotonic())


def words_of(tokenizer: Path) -> list[int]:
    """Return one token for each capital letter, whose text begins with it or with a blank and it.

    Of several it is the longest, as a model's tokens are words more often than letters.
    """
    vocabulary = msgspec.json.decode(tokenizer.read_bytes())["model"]["vocab"]
    found = dict.fromkeys(ascii_uppercase, "")
    for piece in vocabulary:
        if match := re.fullmatch("Ġ?([A-Z])[a-z]{0,7}", piece):
            found[match[1]] = max(found[match[1]], piece, key=lambda text: (len(text), text))
    return [vocabulary[piece] for piece in found.values()]


def build_engine(options: EngineOptions, mailbox: Mailbox, status: Status, **_: Any) -> Engine:
    """Do what `startup.engine.build_engine` does, without a model."""
    script = Script.from_environment()
    status.enter(Phase.LOADING)
    started = time.monotonic()
    while (past := time.monotonic() - started) < script.load_seconds:
        status.enter(Phase.LOADING, int(100 * past / script.load_seconds))
        time.sleep(0.02)
    folder = Path(options.model) if options.model else DEFAULT_MODEL
    config = _read_config(folder)
    rows = options.max_rows or MAX_ROWS
    pages = (options.kv_tokens or rows * PAGES_PER_ROW * PAGE_SIZE) // PAGE_SIZE
    status.stats.rows_total, status.stats.pages_total = rows, pages
    limits = SchedulerLimits(MAX_STEP_TOKENS, 0, max(options.max_waiting or options.max_concurrent, rows))
    scheduler = Scheduler(RowGate(rows), KVManager(PageAllocator(pages + 1), PAGE_SIZE), limits)
    tokenizer = folder / "tokenizer.json"
    name = options.served_model_name or ("tandem-default" if options.model is None else folder.resolve().name)
    facts = ModelFacts(
        name, config["vocab_size"], options.max_len or config["max_position_embeddings"], _end_ids(config),
        hashlib.sha256(tokenizer.read_bytes()).hexdigest(), "cpu", "float32", int(time.time()),
        template_fingerprint(folder),
    )  # fmt: skip
    engine = ScriptedEngine.assemble(
        scheduler,
        ScriptedRuntime(words_of(tokenizer)),
        mailbox,
        FakeCompiler(),
        depth=DEPTH,
        epoch=status.epoch,
        model=facts,
        limits=Limits(
            rows,
            pages * PAGE_SIZE,
            PAGE_SIZE,
            MAX_STEP_TOKENS,
            limits.max_waiting,
            options.max_concurrent,
            options.max_queued_tokens,
        ),
        stats=status.stats,
        clock=time.monotonic,
        stage_clock=time.monotonic,
        advancer=FakeAdvancer(),
    )
    assert isinstance(engine, ScriptedEngine)
    engine.script = script
    return engine


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the model's config.json. Raises ConfigError, as a real engine does, if that is not possible."""
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}") from error
    return config


def _end_ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id", [])
    return [ids] if isinstance(ids, int) else list(ids)


def main() -> None:
    """Run the engine core's own program with the scripted model instead of a real one."""
    script = Script.from_environment()
    if script.protocol_version is not None:
        control.PROTOCOL_VERSION = script.protocol_version
        Leases.take_expired = lambda _: []  # type: ignore[method-assign]
    startup = ModuleType("tandem.engine_core.startup.engine")
    startup.build_engine = build_engine  # type: ignore[attr-defined]
    sys.modules[startup.__name__] = startup
    runpy.run_path(str(ROOT / "engine_core" / "__main__.py"), run_name="__main__")


if __name__ == "__main__":
    main()
