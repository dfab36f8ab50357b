"""Client of the engine core, shared by all requests of a frontend.

It discovers the engine by its heartbeat, keeps one link to it and routes its events to streams.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from tandem.frontend.engine.adapters import KnownAdapters
from tandem.frontend.engine.calls import EngineCall, EngineCalls
from tandem.frontend.engine.compatibility import Fingerprints, differ, mismatch
from tandem.frontend.engine.engine_load import EngineLoad
from tandem.frontend.engine.health import EngineHealth, EngineWatch
from tandem.frontend.engine.held_requests import HeldRequest, HeldRequests
from tandem.frontend.engine.link import EngineLink, encode_command
from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.engine.start_estimate import MAX_SECONDS, UNKNOWN_SECONDS
from tandem.frontend.engine.streams import OpenStreams, ReadySet, TokenStream
from tandem.frontend.errors import ApiError, unavailable
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.protocol.codec import ID_BYTES
from tandem.protocol.commands import Abort, Renew, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import (
    AdapterList,
    Answer,
    AnyEvent,
    Heartbeat,
    Inspection,
    KeyUsage,
    Launched,
    Phase,
    Ready,
    Refused,
    WeightFacts,
)
from tandem.protocol.sockets import Transport, connect_heartbeat, heartbeat_endpoint

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 5.0
"""Seconds after which an unanswered Hello is sent again, on a new link."""

STALE_SECONDS = 1.0
"""Seconds after a broken connection during which heartbeats of that epoch are ignored, because they may have been sent
before the engine exited. If heartbeats continue afterwards, the engine is alive and only the connection was lost."""

WARNING_SECONDS = 20.0
"""Seconds without a heartbeat between two warnings."""


class EngineClient:
    """Connection to the engine, shared by all requests of one event loop.

    No method for streams awaits. A stream is open from `submit` until its terminal event, which comes from the engine
    or from its loss; there is none after `abort`. A request that has lost its streams may be held until the engine is
    back, for at most `hold_timeout` seconds.
    """

    def __init__(
        self,
        endpoint: str,
        transport: Transport,
        fingerprints: Fingerprints,
        watch: EngineWatch,
        metrics: FrontendMetrics,
        clock: Callable[[], float] = time.monotonic,
        hold_timeout: float = 0.0,
        name: str = "frontend",
    ) -> None:
        """Initialize without connecting. name: name of this process in the engine's log."""
        self._name = name
        self._endpoint = endpoint
        self._transport = transport
        self._fingerprints = fingerprints
        self._watch = watch
        self._metrics = metrics
        self._clock = clock
        self._warn_at = clock() + WARNING_SECONDS
        """Time from which missing heartbeats are warned about."""
        self._context: zmq.asyncio.Context | None = None
        self._link: EngineLink | None = None
        self._refusal: tuple[int, str] | None = None
        self._broken: tuple[int, float, str] | None = None
        """Epoch, time and reason of the last broken connection, until a new one is open."""
        self._lost_identity = b""
        """Identity of the last ready link that was lost."""
        self._streams = OpenStreams()
        self.num_links = 0
        """Number of links that became ready, which is the number of the current or last one."""
        self.facts: Ready | None = None
        """Facts and limits of that link's engine."""
        self.key_usage: dict[str, KeyUsage] = {}
        """Last reported usage of API keys with limits, by name."""
        self._load = EngineLoad(clock)
        self._held = HeldRequests(hold_timeout)
        self._is_ending = False
        """True once requests fail instead of being held."""
        self._ids = itertools.count(1)
        self.calls = EngineCalls(self._send_call)
        self.adapters = KnownAdapters()
        self._monitor = EngineMonitor(watch, self._on_heartbeat, self._tick)
        self._listener: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start listening for the engine.

        Raises ValueError for an endpoint that the transport does not allow.

        """
        self._context = zmq.asyncio.Context()
        subscriber = connect_heartbeat(self._context, heartbeat_endpoint(self._endpoint), self._transport)
        self._listener = asyncio.create_task(self._monitor.run(subscriber))

    async def stop(self) -> None:
        """Fail all open streams, send a Goodbye and close the sockets."""
        self.end_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if self._link is not None:
            self._link.close(polite=True)
            self._link = None
        if self._context is not None:
            self._context.term()

    @property
    def num_open(self) -> int:
        """Number of streams without a terminal event."""
        return len(self._streams)

    @property
    def num_held(self) -> int:
        """Number of requests that wait for the engine to come back."""
        return len(self._held)

    @property
    def model_name(self) -> str:
        """Model name reported by the engine; "" before the first link."""
        return self.facts.model.name if self.facts is not None else ""

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens of streams that wait for their first output."""
        return self._streams.queued_tokens

    def retry_after_end(self, excess: int, sequences: int) -> int:
        """Return the Retry-After of a refused request with this many sequences, in seconds.

        excess: sequences that must finish first.
        """
        return 1 if self.facts is None else self._load.retry_after_end(excess, sequences, self.facts.limits)

    def retry_after_prefill(self, excess: int, tokens: int) -> int:
        """Return the Retry-After of a refused request with this many prompt tokens, in seconds.

        excess: waiting prompt tokens that must be admitted first.
        """
        return 1 if self.facts is None else self._load.retry_after_prefill(excess, tokens, self.facts.limits)

    def load_limits(self, max_concurrent: int, max_queued_tokens: int) -> tuple[int, int]:
        """Return the limits of this frontend, lowered to those of the engine.

        They apply to sequences, and to prompt tokens that wait for their first output.
        """
        if self.facts is None:
            return max_concurrent, max_queued_tokens
        limits = self.facts.limits
        return min(max_concurrent, limits.max_concurrent), min(max_queued_tokens, limits.max_queued_tokens)

    def retry_after(self, code: ErrorCode, sequences: int, tokens: int) -> int:
        """Estimate the Retry-After of a failed request, in seconds.

        It failed because of the engine. It has this many sequences and prompt tokens.
        """
        if code in (ErrorCode.ENGINE_PAUSED, ErrorCode.ENGINE_SLEEPING):  # its heartbeat may not report that yet
            return UNKNOWN_SECONDS
        if code is not ErrorCode.OVERLOADED:
            return self.seconds_until_ready()
        return 1 if self.facts is None else self._load.retry_after(sequences, tokens, self.facts.limits)

    def health(self) -> EngineHealth:
        """Return the health of the engine, ready if a request would be accepted now.

        It has the reason if it is not ready.
        """
        health = self._watch.health()
        if not health.takes_requests:
            return health
        heartbeat = self._watch.heartbeat
        assert heartbeat is not None
        if self._refusal is not None and self._refusal[0] == heartbeat.engine_epoch:
            return EngineHealth(False, "refused", self._refusal[1])
        if self._link is None:
            lost = self._broken[2] if self._broken is not None else "the engine was silent for too long"
            return EngineHealth(False, "lost", f"{lost}; waiting for a heartbeat from it or from another engine")
        if self._link.ready is None:
            return EngineHealth(False, "connecting", "the handshake with the engine is under way")
        return health

    @property
    def weights(self) -> WeightFacts | None:
        """Weights of the engine, as reported last; None: they cannot change, or nothing was reported yet."""
        heartbeat = self._watch.heartbeat
        return None if heartbeat is None else heartbeat.weights

    def seconds_until_ready(self) -> int:
        """Estimate the seconds until a request would be accepted."""
        match self.health().status:
            case "ready" | "connecting":
                return 1
            case "refused":
                return MAX_SECONDS
            case _:
                return self._watch.seconds_until_ready()

    def ready(self) -> Ready:
        """Return the engine's facts and limits.

        Raises ApiError 503 with the reason while it is not ready.
        """
        health = self.health()
        if not health.takes_requests or self._link is None or self._link.ready is None:
            raise self._unavailable(health.reason)
        return self._link.ready

    def next_id(self) -> int:
        """Return a new request id."""
        return next(self._ids)

    def submit(self, command: Submit, choice: int, ready_set: ReadySet) -> TokenStream:
        """Submit a request and return its output stream.

        Raises ApiError 503 while the engine is not ready, 413 for a command that is too large.
        """
        self.ready()
        assert self._link is not None
        data = encode_command(command)
        prompt_len = len(command.prompt_ids) // ID_BYTES if command.sampling.choice == 0 else 0
        stream = self._streams.open(command.request_id, choice, ready_set, prompt_len)
        self._link.send_encoded(data)
        return stream

    def abort(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort requests in the engine and forget their streams.

        Ids of ended requests are ignored.
        """
        open_ids = self._streams.forget(request_ids)
        if open_ids and self._link is not None:
            self._link.send(Abort(open_ids, reason))

    def hold(self, request: HeldRequest, link: int, since: float) -> bool:
        """Hold a request until the engine is ready, then have it submitted again.

        link: number of the link on which it was lost or refused. since: start of its wait. Returns False if requests
        are not held.
        """
        if self._is_ending or not self._held.timeout:
            return False
        self._held.add(request, link, self._clock(), since)
        if link != self.num_links:
            self._resubmit()
        return True

    def release(self, request: HeldRequest) -> None:
        """Remove a request that may be held."""
        self._held.discard(request)

    def _resubmit(self) -> None:
        if len(self._held) and self.health().takes_requests:
            count = self._held.resubmit(self.num_links, self._clock())
            self._metrics.link.resubmitted.inc(count)
            if count:
                logger.info("requests that had lost their engine and were submitted again: %d", count)

    def _unavailable(self, reason: str) -> ApiError:
        """Return the 503 of a request while the engine is not ready."""
        code = ErrorCode.SHUTTING_DOWN if self.health().status == "draining" else ErrorCode.ENGINE_UNAVAILABLE
        return unavailable(f"the engine is not ready: {reason}", code, self.seconds_until_ready())

    def _send_call(self, call: EngineCall) -> None:
        self.ready()
        assert self._link is not None
        self._link.send(call)

    def end_all(self, code: ErrorCode, message: str) -> None:
        """Fail all open streams, calls and held requests.

        Requests are no longer held. Sequences of the streams are aborted in the engine.
        """
        self._is_ending = True
        self._held.give_up_all(unavailable(message, code))
        self._fail_all(code, message)

    def _fail_all(self, code: ErrorCode, message: str) -> None:
        open_ids = self._streams.fail_all(code, message)
        if open_ids and self._link is not None:
            self._link.send(Abort(open_ids))
        self.calls.fail_all(unavailable(message, code, self.seconds_until_ready()))

    def _too_long(self) -> ApiError:
        reason = self.health().reason or "it was lost again, or has no room"
        message = f"the engine did not come back within {self._held.timeout:g} s (--hold-timeout): {reason}"
        return unavailable(message, retry_after=self.seconds_until_ready())

    def _tick(self) -> None:
        if self._watch.heartbeat is None and self._clock() > self._warn_at:
            self._warn_at = self._clock() + WARNING_SECONDS
            keys = "?"
            if self._transport.curve is not None:
                keys = ", and is its engine.key the one in --curve-keys?"
            elif self._endpoint.startswith("tcp:"):
                keys = ", without keys? One that has keys needs --curve-keys here."
            logger.warning("no heartbeat from an engine on %s yet; is it running there%s", self._endpoint, keys)
        if self._link is not None and self._watch.is_silent:
            self._lose(ErrorCode.ENGINE_UNAVAILABLE, self._watch.health().reason)
        self._held.expire(self._clock(), self._too_long)
        self._resubmit()

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        now, broken = self._clock(), self._broken
        if broken is not None and broken[0] == heartbeat.engine_epoch and now - broken[1] < STALE_SECONDS:
            return
        self._watch.observe(heartbeat)
        self.calls.note_heartbeat(heartbeat)
        if heartbeat.phase is Phase.READY:
            self._learn_adapters(heartbeat.engine_epoch, heartbeat.adapters)
        self._load.observe(heartbeat, self.facts.limits if self.facts is not None else None)
        link = self._link
        if link is not None and link.epoch != heartbeat.engine_epoch:
            self._lose(ErrorCode.ENGINE_UNAVAILABLE, "the engine was restarted")
        elif link is not None and heartbeat.phase is Phase.FAILED:
            self._lose(ErrorCode.ENGINE_FAILED, f"the engine failed: {heartbeat.detail or 'no detail given'}")
        elif link is not None and link.ready is None and now - link.opened_at > HELLO_TIMEOUT:
            self._lose(ErrorCode.ENGINE_UNAVAILABLE, f"the engine did not answer a Hello for {HELLO_TIMEOUT:.0f} s")
        refused = self._refusal is not None and self._refusal[0] == heartbeat.engine_epoch
        if self._link is None and heartbeat.phase is Phase.READY and not refused:
            self._connect(heartbeat.engine_epoch, now)

    def _connect(self, epoch: int, now: float) -> None:
        assert self._context is not None
        link = self._link = EngineLink(self._context, epoch, self._streams, self._on_event, self._on_break)
        self._broken = None
        link.open(self._endpoint, self._transport, self._name, now, self._lost_identity)

    def _on_break(self, reason: str) -> None:
        if self._link is not None:
            self._broken = (self._link.epoch, self._clock(), reason)
        self._lose(ErrorCode.ENGINE_UNAVAILABLE, reason)

    def _lose(self, code: ErrorCode, reason: str) -> None:
        """Close the link and fail its streams.

        The next heartbeat may open a new one.

        """
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        self._watch.note_loss()
        if link.ready is not None:
            self._lost_identity = link.identity
        self._metrics.link.connected.set(0)
        self._metrics.link.losses.inc()
        logger.warning("lost the engine of epoch %d (open streams: %d): %s", link.epoch, len(self._streams), reason)
        self._fail_all(code, reason)

    def _on_event(self, event: AnyEvent) -> None:
        match event:
            case Ready():
                self._on_ready(event)
            case Answer() | Inspection():
                if isinstance(event, Answer) and self._link is not None:
                    self._watch.note_pause(self._link.epoch, event.pause_changes)
                    if event.adapters is not None:
                        self._learn_adapters(self._link.epoch, event.adapters)
                self.calls.answer(event)
            case KeyUsage(name):
                self.key_usage[name] = event
            case Launched(request_ids):
                self._held.note_launched(frozenset(request_ids))
            case Refused(message):
                self._refuse(f"the engine refused this frontend: {message}")

    def _learn_adapters(self, epoch: int, listed: AdapterList | None) -> None:
        """Record the adapters of an engine, and acknowledge a list that has changed."""
        link = self._link
        if self.adapters.observe(epoch, listed) and listed and link is not None and link.ready and link.epoch == epoch:
            link.send(Renew(listed.changes))

    def _on_ready(self, ready: Ready) -> None:
        link = self._link
        if link is None or ready.engine_epoch != link.epoch:
            return
        reason = mismatch(ready, self._fingerprints)
        if reason is not None:
            self._refuse(reason)
        else:
            link.ready = ready
            self.adapters.observe(link.epoch, ready.adapters)
            self.num_links += 1
            self._metrics.link.connected.set(1)
            self._metrics.link.connects.inc()
            logger.info("connected to the engine of epoch %d, model %s", ready.engine_epoch, ready.model.name)
            previous, self.facts = self.facts, ready
            if previous is not None and differ(previous.model, ready.model):
                message = f"the engine came back with other facts of its model, {ready.model.name}; try again"
                self._held.give_up_all(unavailable(message))
            self._resubmit()  # before new requests

    def _refuse(self, reason: str) -> None:
        """Close the link to an incompatible engine.

        The client does not reconnect to this epoch.
        """
        assert self._link is not None
        self._refusal = (self._link.epoch, reason)
        self._lose(ErrorCode.ENGINE_UNAVAILABLE, reason)
        self._held.give_up_all(unavailable(reason, retry_after=MAX_SECONDS))
