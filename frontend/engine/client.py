"""The frontend's side of the wire: finds the engine by its heartbeat, keeps one link to it, routes its events."""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from tandem.frontend.engine.calls import Call, EngineCalls
from tandem.frontend.engine.health import EngineHealth, EngineWatch
from tandem.frontend.engine.link import EngineLink
from tandem.frontend.engine.streams import PromptQueue, ReadySet, TokenStream
from tandem.frontend.errors import unavailable
from tandem.frontend.metrics import FrontendMetrics
from tandem.protocol.codec import decode_event, runs
from tandem.protocol.commands import Abort, Submit
from tandem.protocol.errors import ErrorCode, ProtocolError
from tandem.protocol.events import Answer, AnyEvent, Failure, Heartbeat, Inspection, Phase, Ready, Refused, StepOutput
from tandem.protocol.sockets import Transport, connect_heartbeat, heartbeat_endpoint
from tandem.protocol.version import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""How often silence is looked for."""

HELLO_TIMEOUT = 5.0
"""Seconds after which an unanswered Hello is sent again, on a new link."""


STALE_SECONDS = 1.0
"""After a broken connection beats of that life are not heard for so long: they may have left before it ended. An
engine that still beats afterwards lives, and only the connection to it was lost."""


_ID_BYTES = 4


class EngineClient:
    """Everything here runs in one event loop; what concerns streams awaits nothing.

    A stream is open from `submit` until its terminal event. That comes from the engine, from the loss of the
    engine, or not at all once the caller has given the request up with `abort`.
    """

    def __init__(
        self,
        endpoint: str,
        transport: Transport,
        tokenizer_fingerprint: str,
        watch: EngineWatch,
        metrics: FrontendMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._fingerprint = tokenizer_fingerprint
        self._watch = watch
        self._metrics = metrics
        self._clock = clock
        self._context: zmq.asyncio.Context | None = None
        self._link: EngineLink | None = None
        self._refusal: tuple[int, str] | None = None
        self._broken: tuple[int, float, str] | None = None
        """Epoch, time and reason of the last connection that broke, until there is another."""
        self._streams: dict[int, TokenStream] = {}
        self._waiting = PromptQueue()
        self._ids = itertools.count(1)
        self.calls = EngineCalls(self._send_call)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to listen; raises ValueError for an endpoint that the transport does not allow."""
        self._context = zmq.asyncio.Context()
        subscriber = connect_heartbeat(self._context, heartbeat_endpoint(self._endpoint), self._transport)
        self._tasks = [asyncio.create_task(self._listen(subscriber)), asyncio.create_task(self._look_for_silence())]

    async def stop(self) -> None:
        """Ends every open stream with an error, says goodbye and closes the sockets."""
        self.fail_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            self._link.close(polite=True)
            self._link = None
        if self._context is not None:
            self._context.term()

    @property
    def num_open(self) -> int:
        """Streams that have had no terminal event."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of streams that have had no event yet."""
        return self._waiting.tokens

    def health(self) -> EngineHealth:
        """Whether a request would be taken now, and if not, why."""
        health = self._watch.health(self._clock())
        if not health.ready:
            return health
        beat = self._watch.beat
        assert beat is not None
        if self._refusal is not None and self._refusal[0] == beat.engine_epoch:
            return EngineHealth(False, "refused", self._refusal[1])
        if self._link is None and self._broken is not None:
            return EngineHealth(False, "lost", self._broken[2])
        if self._link is None or self._link.ready is None:
            return EngineHealth(False, "connecting", "the handshake with the engine is under way")
        return health

    def ready(self) -> Ready:
        """Facts and limits of the engine. Raises ApiError 503 with the reason while there is none to serve."""
        health = self.health()
        if not health.ready or self._link is None or self._link.ready is None:
            code = ErrorCode.SHUTTING_DOWN if health.status == "draining" else ErrorCode.ENGINE_UNAVAILABLE
            raise unavailable(f"the engine is not ready: {health.reason}", code)
        return self._link.ready

    def next_id(self) -> int:
        """A request id that this process has never used."""
        return next(self._ids)

    def submit(self, command: Submit, choice: int, ready_set: ReadySet) -> TokenStream:
        """Sends a request whose output arrives in the stream returned. Raises ApiError 503 when not ready."""
        self.ready()
        assert self._link is not None
        stream = TokenStream(command.request_id, choice, ready_set)
        self._streams[command.request_id] = stream
        self._waiting.add(command.request_id, len(command.prompt_ids) // _ID_BYTES)
        self._link.send(command)
        return stream

    def abort(self, request_ids: Iterable[int]) -> None:
        """Gives requests up: the engine is told first, then they are forgotten. Ids that have ended are ignored."""
        open_ids = [request_id for request_id in request_ids if request_id in self._streams]
        if not open_ids:
            return
        if self._link is not None:
            self._link.send(Abort(open_ids))
        self._waiting.remove_all(open_ids)
        for request_id in open_ids:
            self._streams.pop(request_id, None)

    def _send_call(self, call: Call) -> None:
        self.ready()
        assert self._link is not None
        self._link.send(call)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Ends every open stream with this error and frees what the engine holds for them."""
        if self._link is not None and self._streams:
            self._link.send(Abort(list(self._streams)))
        self._end_streams(code, message)

    def _end_streams(self, code: ErrorCode, message: str) -> None:
        streams, self._streams = self._streams, {}
        self._waiting.remove_all(streams)
        for stream in streams.values():
            stream.fail(Failure(stream.request_id, code, message))
        self.calls.fail_all(unavailable(message, code))

    async def _listen(self, subscriber: zmq.asyncio.Socket) -> None:
        with contextlib.closing(subscriber):
            while True:
                data = await subscriber.recv()
                try:
                    event = decode_event(data)
                except ProtocolError as error:
                    logger.warning("unreadable heartbeat: %s", error)
                    continue
                if isinstance(event, Heartbeat):
                    self._on_beat(event)

    async def _look_for_silence(self) -> None:
        expected = self._clock()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self._clock()
            if now - expected > TICK_SECONDS + 1.0:
                self._watch.reset_timers(now)
            expected = now
            if self._link is not None and self._watch.silence(now) > self._watch.beat_timeout:
                self._lose(ErrorCode.ENGINE_UNAVAILABLE, self._watch.health(now).reason)

    def _on_beat(self, beat: Heartbeat) -> None:
        now = self._clock()
        if self._broken is not None and self._broken[0] == beat.engine_epoch and now - self._broken[1] < STALE_SECONDS:
            return
        self._watch.observe(beat, now)
        link = self._link
        if link is not None and link.epoch != beat.engine_epoch:
            self._lose(ErrorCode.ENGINE_UNAVAILABLE, "the engine was restarted")
        elif link is not None and beat.phase is Phase.FAILED:
            self._lose(ErrorCode.ENGINE_FAILED, f"the engine failed: {beat.detail or 'no detail given'}")
        elif link is not None and link.ready is None and now - link.opened_at > HELLO_TIMEOUT:
            self._lose(ErrorCode.ENGINE_UNAVAILABLE, f"the engine did not answer a Hello for {HELLO_TIMEOUT:.0f} s")
        refused = self._refusal is not None and self._refusal[0] == beat.engine_epoch
        if self._link is None and beat.phase is Phase.READY and not refused:
            self._connect(beat.engine_epoch, now)

    def _connect(self, epoch: int, now: float) -> None:
        assert self._context is not None
        link = EngineLink(self._context, epoch, self._on_event, self._on_break)
        self._link = link
        self._broken = None
        link.open(self._endpoint, self._transport, f"frontend-{os.getpid()}", now)

    def _on_break(self, reason: str) -> None:
        if self._link is not None:
            self._broken = (self._link.epoch, self._clock(), reason)
        self._lose(ErrorCode.ENGINE_UNAVAILABLE, reason)

    def _lose(self, code: ErrorCode, reason: str) -> None:
        """The link is of no further use: its streams end with an error, and the next beat may open a new one."""
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        self._metrics.engine_connected.set(0)
        logger.warning("lost the engine of epoch %d with %d streams open: %s", link.epoch, len(self._streams), reason)
        self._end_streams(code, reason)

    def _on_event(self, event: AnyEvent) -> None:
        match event:
            case StepOutput():
                self._on_step(event)
            case Ready():
                self._on_ready(event)
            case Answer() | Inspection():
                self.calls.answer(event)
            case Refused(message):
                self._refuse(f"the engine refused this frontend: {message}")
            case Heartbeat():
                pass

    def _on_step(self, output: StepOutput) -> None:
        streams = self._streams
        for started in output.started:
            if (stream := streams.get(started.request_id)) is not None:
                stream.cached_tokens = started.cached_tokens
        for request_id, tokens in runs(output):
            if (stream := streams.get(request_id)) is not None:
                self._waiting.remove(request_id)
                stream.put(tokens)
        for logprobs in output.logprobs:
            if (stream := streams.get(logprobs.request_id)) is not None:
                stream.put_logprobs(logprobs)
        for finished in output.finished:
            if (stream := streams.pop(finished.request_id, None)) is not None:
                self._waiting.remove(finished.request_id)
                stream.finish(finished)
        for failure in output.failures:
            if (stream := streams.pop(failure.request_id, None)) is not None:
                self._waiting.remove(failure.request_id)
                stream.fail(failure)

    def _on_ready(self, ready: Ready) -> None:
        link = self._link
        if link is None or ready.engine_epoch != link.epoch:
            return
        theirs, ours = ready.model.tokenizer_fingerprint, self._fingerprint
        if ready.protocol_version != PROTOCOL_VERSION:
            self._refuse(f"the engine speaks protocol {ready.protocol_version}, this frontend {PROTOCOL_VERSION}")
        elif theirs and ours and theirs != ours:
            self._refuse(
                f"the engine's tokenizer.json (sha256 {theirs[:12]}) is not this frontend's ({ours[:12]}); "
                "give both the same model folder"
            )
        else:
            link.ready = ready
            self._metrics.engine_connected.set(1)
            self._metrics.engine_connects.inc()
            logger.info("connected to the engine of epoch %d, model %s", ready.engine_epoch, ready.model.name)

    def _refuse(self, reason: str) -> None:
        """This life of the engine and this frontend do not fit: no further try before the next one."""
        assert self._link is not None
        self._refusal = (self._link.epoch, reason)
        self._lose(ErrorCode.ENGINE_UNAVAILABLE, reason)
