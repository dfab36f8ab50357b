"""An engine without a model: the real protocol over real sockets, tokens from a script, failures on demand."""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable

import zmq
from msgspec import structs

from tandem.protocol.codec import decode_command, encode, step_output, unpack_ids, with_details
from tandem.protocol.commands import (
    SLEEP_TAGS,
    Abort,
    CancelSwap,
    EndSession,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    InitWeightTransfer,
    Inspect,
    InspectSwap,
    Pause,
    ResetPrefixCache,
    Resume,
    SetPolicy,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    WakeUp,
)
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import (
    Answer,
    AnyEvent,
    DetailedOutput,
    Failure,
    Finished,
    Heartbeat,
    InspectedSession,
    Inspection,
    Limits,
    ModelFacts,
    PauseFacts,
    Phase,
    Ready,
    Refused,
    SequenceTimes,
    Started,
    StepOutput,
    SwapFacts,
    WeightFacts,
)
from tandem.protocol.sockets import bind_heartbeat, bind_router, heartbeat_endpoint
from tandem.protocol.stats import EngineStats
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.engine_request import Running

END_ID = 1

_epochs = itertools.count(1)

Script = Callable[[Submit], list[int]]


def repeat_prompt(submit: Submit) -> list[int]:
    """Repeat the ids of the prompt up to `max_tokens`."""
    ids = itertools.cycle(unpack_ids(submit.prompt_ids))
    return list(itertools.islice(ids, submit.sampling.max_tokens))


Update = InitWeightTransfer | StartWeightUpdate | UpdateWeights | FinishWeightUpdate


class FakeEngine:
    """Runs in a thread. Each step gives every running request `tokens_per_step` tokens of its script.

    A script shorter than `max_tokens` ends with `end_id` as the stop token. The public attributes may be changed at
    any time: `hold` accepts and yields nothing, `frozen` stops heartbeats and steps with the sockets open, `refusal`
    answers every submit with this failure, `break_after` fails a request after that number of tokens, `cached`
    returns how much of a prompt was in the cache, `drafts` are reported for each request with each step, `mute` leaves
    calls without an answer, `resumed_early` answers a pause as if a resume had come first.
    """

    def __init__(
        self,
        endpoint: str,
        script: Script = repeat_prompt,
        fingerprint: str = "",
        name: str = "fake-model",
        vocab_size: int = 420,
        max_len: int = 2048,
        max_prediction: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self.script = script
        self.facts = ModelFacts(
            name,
            vocab_size,
            max_len,
            [END_ID],
            fingerprint,
            "cpu",
            "float32",
            1_700_000_000,
            "",
            "fp8",
            weight_transfer="gloo",
        )
        self.protocol_version = PROTOCOL_VERSION
        self.phase = Phase.READY
        self.percent = 100
        self.detail = ""
        self.hold = False
        self.frozen = False
        self.hello_refusal: str | None = None
        self.refusal: ErrorCode | None = None
        self.break_after: int | None = None
        self.cached: Callable[[Submit], int] = lambda _: 0
        self.drafts: tuple[int, int, bool] | tuple[()] = ()
        self.mute = False
        self.policy = "fcfs"
        self.pause: Pause | None = None
        self.resumed_early = False
        self.updates: list[Update] = []
        """Calls of a trainer, which succeed unless there is an `update_problem`."""
        self.update_problem = ""
        self.is_receiving = False
        """True to answer no call of a trainer, as an engine that waits for tensors."""
        self.weights: WeightFacts | None = None
        self.swap: SwapFacts | None = None
        """State that heartbeats report; commands of swaps stay without an answer then."""
        self.sleeps: list[Sleep | WakeUp] = []
        """Calls to sleep and to wake, which succeed unless there is a `sleep_refusal`."""
        self.sleep_refusal: Answer | None = None
        self.asleep: list[str] = []
        self.kv_tokens = 65536
        self.max_prediction = max_prediction
        self.sessions: set[str] = set()
        self.end_id = END_ID
        self.tokens_per_step = 1
        self.step_seconds = 0.001
        self.beat_seconds = 0.05
        self.epoch = 0
        self.stats = EngineStats()
        self.hellos: list[Hello] = []
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.goodbyes = 0
        self._greeted: set[bytes] = set()
        self._running: dict[tuple[bytes, int], Running] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "FakeEngine":
        """Start with a new epoch and without any state of the epoch before."""
        self.epoch = time.time_ns() + next(_epochs)
        self.stats = EngineStats()
        self._greeted.clear()
        self._running.clear()
        self._stop.clear()
        bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,), name="fake-engine")
        self._thread.start()
        assert bound.wait(120), "the fake engine could not bind its sockets"
        return self

    def die(self) -> None:
        """Close the sockets without a message, as a killed process does."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(120)
            self._thread = None

    def renew(self) -> None:
        """Undo what was set from outside and forget what was received; clients and their requests stay."""
        for name, value in vars(FakeEngine(self.endpoint)).items():
            if not name.startswith("_") and name not in ("epoch", "facts", "stats"):
                setattr(self, name, value)
        self.stats.pause_changes += self.stats.paused
        self.stats.paused = 0  # as `pause`, which is None now

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self, bound: threading.Event) -> None:
        context = zmq.Context()
        router = bind_router(context, self.endpoint)
        publisher = bind_heartbeat(context, heartbeat_endpoint(self.endpoint))
        bound.set()
        next_beat = 0.0
        while not self._stop.is_set():
            if self.frozen:
                time.sleep(0.005)
                continue
            if time.monotonic() >= next_beat:
                publisher.send(encode(self._beat()))
                next_beat = time.monotonic() + self.beat_seconds
            if router.poll(self.step_seconds * 1000 if self._running else 5):
                self._drain(router)
            if not self.hold and self._running:
                self._step(router)
        context.destroy(linger=0)

    def _beat(self) -> Heartbeat:
        self.stats.running = len(self._running)
        weights = WeightFacts("1", "sleeping", asleep=self.asleep) if self.asleep else self.weights
        given = self.epoch, self.phase, self.percent, self.detail, len(self._running), self.stats
        mode, refuses = (self.pause.mode, self.pause.refuse_new) if self.pause else (None, False)
        pause = PauseFacts(mode, refuses, bool(self.stats.paused))
        return Heartbeat(*given, weights=weights, swap=self.swap, pause=pause)

    def _drain(self, router: zmq.Socket[bytes]) -> None:
        while router.poll(0):
            identity, data = router.recv_multipart()
            command = decode_command(data)
            match command:
                case Hello():
                    self._greet(router, identity, command)
                case Submit() if identity in self._greeted:
                    self._accept(router, identity, command)
                case Abort() if identity in self._greeted:
                    self.aborts.extend(command.request_ids)
                    for request_id in command.request_ids:
                        self._running.pop((identity, request_id), None)
                case EndSession() | SetPolicy() | Inspect() | Pause() | Resume() if (
                    identity in self._greeted and not self.mute
                ):
                    self._send(router, identity, self._answer(command))
                case InitWeightTransfer() | StartWeightUpdate() | UpdateWeights() | FinishWeightUpdate():
                    self.updates.append(command)
                    answer = Answer(command.call, not self.update_problem, self.update_problem)
                    if not self.is_receiving:
                        self._send(router, identity, answer)
                case Sleep() | WakeUp():
                    self._send(router, identity, self._sleep_or_wake(command))
                case SwapWeights(call) | CancelSwap(call) | InspectSwap(call) if self.swap is None:
                    self._send(router, identity, Answer(call, False, "there are no swaps"))
                case CancelSwap(call) if self.swap is not None:
                    self.swap = structs.replace(self.swap, state="idle")
                    self._send(router, identity, Answer(call, True, swap=self.swap))
                case ResetPrefixCache(call):
                    self._send(router, identity, Answer(call, not self._running))
                case Goodbye():
                    self.goodbyes += 1
                    self._forget(identity)

    def _sleep_or_wake(self, command: Sleep | WakeUp) -> Answer:
        self.sleeps.append(command)
        if self.sleep_refusal is not None:
            return structs.replace(self.sleep_refusal, call=command.call)
        if isinstance(command, Sleep):
            self.asleep = sorted(SLEEP_TAGS)
        else:
            self.asleep = [tag for tag in self.asleep if tag not in (command.tags or SLEEP_TAGS)]
        self.stats.sleeping = int(bool(self.asleep))
        self.refusal = ErrorCode.ENGINE_SLEEPING if self.asleep else None
        return Answer(command.call, True)

    def _forget(self, identity: bytes) -> None:
        for key in [key for key in self._running if key[0] == identity]:
            del self._running[key]

    def _greet(self, router: zmq.Socket[bytes], identity: bytes, hello: Hello) -> None:
        if hello.engine_epoch != self.epoch:
            return
        self.hellos.append(hello)
        if self.hello_refusal is not None:
            self._send(router, identity, Refused(self.hello_refusal))
            return
        self._greeted.add(identity)
        limits = Limits(
            max_rows=64,
            kv_tokens=self.kv_tokens,
            page_size=16,
            max_step_tokens=512,
            max_waiting=1024,
            max_prediction=self.max_prediction,
        )
        self._send(router, identity, Ready(self.protocol_version, self.epoch, self.facts, limits))

    def _accept(self, router: zmq.Socket[bytes], identity: bytes, submit: Submit) -> None:
        self.submits.append(submit)
        refusal = ErrorCode.SESSION_BUSY if submit.session in self._busy() else self.refusal
        if refusal is not None:
            failure = Failure(submit.request_id, refusal, "refused by the fake engine")
            self._send(router, identity, StepOutput(0, b"", b"", b"", [], [failure]))
            return
        if submit.session:
            self.sessions.add(submit.session)
        tokens = self.script(submit)
        room = submit.sampling.max_tokens
        ends = len(tokens) < room
        tokens = [*tokens, self.end_id] if ends else tokens[:room]
        self._running[identity, submit.request_id] = Running(
            identity, submit, tokens, ends, len(submit.prompt_ids) // 4
        )

    def _answer(self, command: EndSession | SetPolicy | Inspect | Pause | Resume) -> Answer | Inspection:
        match command:
            case EndSession(call, session):
                known = session in self.sessions
                self.sessions.discard(session)
                return Answer(call, known, "" if known else "no such session")
            case SetPolicy(call, policy):
                if policy not in POLICIES:
                    return Answer(call, False, f"policy {policy!r} does not exist")
                self.policy = policy
                return Answer(call, True)
            case Inspect(call):
                return self._inspection(call)
            case Pause(call) if self.resumed_early:
                return Answer(call, False, "resumed by the fake engine")
            case Pause(call):
                self.pause, self.hold = command, True
                return self._answer_paused(call, 1)
            case Resume(call):
                self.pause, self.hold = None, False
                return self._answer_paused(call, 0)

    def _answer_paused(self, call: int, paused: int) -> Answer:
        self.stats.pause_changes += paused != self.stats.paused
        self.stats.paused = paused
        return Answer(call, True, pause_changes=self.stats.pause_changes)

    def _inspection(self, call: int) -> Inspection:
        rows = self._running.values()
        sequences = [running.inspected(row, self.cached(running.submit)) for row, running in enumerate(rows)]
        busy = self._busy()
        sessions = [InspectedSession(name, name in busy, 2, 0.0) for name in sorted(self.sessions)]
        mode, refuses = (self.pause.mode, self.pause.refuse_new) if self.pause else (None, False)
        return Inspection(call, self.policy, self.stats, 4000, 0, sequences, sessions, 0, mode, refuses)

    def _busy(self) -> set[str]:
        return {running.submit.session for running in self._running.values()} - {""}

    def _step(self, router: zmq.Socket[bytes]) -> None:
        """Send one step output to each frontend."""
        self.stats.steps_launched += 1
        self.stats.steps_committed += 1
        for identity in {running.identity for running in self._running.values()}:
            rows = [running for running in self._running.values() if running.identity == identity]
            runs = [row.tokens[: self.tokens_per_step] for row in rows]
            output = step_output(
                self.stats.steps_committed,
                [row.request_id for row in rows],
                [token for run in runs for token in run],
                [len(run) for run in runs],
            )
            if any(row.submit.is_traced for row in rows) or self.drafts:
                drafted = [row.request_id for row in rows] if self.drafts else []
                output = with_details(output, [], drafted, self.drafts * len(rows))
            for row, run in zip(rows, runs, strict=True):
                output.logprobs.extend(row.logprobs(len(run)))
                if row.position == len(row.submit.prompt_ids) // 4 and (cached := self.cached(row.submit)):
                    output.started.append(Started(row.request_id, cached))
                self._advance(row, len(run), output)
            self._send(router, identity, output)

    def _advance(self, row: Running, count: int, output: StepOutput) -> None:
        row.tokens = row.tokens[count:]
        row.position += count
        if self.break_after is not None:
            self.break_after -= count
            if self.break_after <= 0:
                output.failures.append(Failure(row.request_id, ErrorCode.MODEL_FAILED, "broken by the fake engine"))
                del self._running[row.identity, row.request_id]
                return
        if not row.tokens:
            if isinstance(output, DetailedOutput) and row.submit.is_traced:
                output.times.append(SequenceTimes(row.request_id, 0.0001, 0.0002, 0.0003, 0.0004, row.position))
            reason = FinishReason.STOP if row.ends_by_itself else FinishReason.LENGTH
            output.finished.append(Finished(row.request_id, reason, self.end_id if row.ends_by_itself else None))
            del self._running[row.identity, row.request_id]

    def _send(self, router: zmq.Socket[bytes], identity: bytes, event: AnyEvent) -> None:
        try:
            router.send_multipart([identity, encode(event)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(identity)


def run_as_process(argv: list[str]) -> FakeEngine:
    """Serve until SIGTERM, as the body of a fake `engine_core/__main__.py`; return the engine for inspection."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    engine = FakeEngine(argv[argv.index("--endpoint") + 1]).start()
    while not ended.wait(0.05):
        pass
    engine.die()
    return engine


if __name__ == "__main__":
    run_as_process(sys.argv)
