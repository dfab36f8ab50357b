"""Calls to the engine: commands with exactly one reply each."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress

from tandem.frontend.errors import ApiError, unavailable
from tandem.protocol.commands import (
    CancelSwap,
    EndSession,
    FinishWeightUpdate,
    InitWeightTransfer,
    Inspect,
    InspectSwap,
    LoadAdapter,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    SetPolicy,
    Sleep,
    StartWeightUpdate,
    SwapMode,
    SwapWeights,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from tandem.protocol.events import Answer, Heartbeat, Inspection, PauseFacts

CALL_SECONDS = 10.0
"""Seconds after which a call fails; the engine replies between two steps."""

_OCCUPIED = "the engine is replacing its weights, going to sleep or waking; try again later"

ADAPTER_SECONDS = 300.0
"""The same for a load, which reads files, and an unload, which lasts as long as the requests of the adapter."""

UpdateCall = InitWeightTransfer | StartWeightUpdate | UpdateWeights | FinishWeightUpdate
SwapCall = SwapWeights | CancelSwap | InspectSwap
EngineCall = (
    EndSession
    | SetPolicy
    | Inspect
    | Pause
    | Resume
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | UpdateCall
    | SwapCall
    | Sleep
    | WakeUp
)
EngineReply = Answer | Inspection
ReadCall = Inspect | InspectSwap


def pause_of(inspection: Inspection) -> PauseFacts:
    """Return the pause in an inspection."""
    return PauseFacts(inspection.pause_mode, inspection.refuses_new, bool(inspection.stats.paused))


class EngineCalls:
    """Table of open calls, which matches replies to calls by number.

    Numbers are never reused, so late replies are ignored. `send` sends a call or raises ApiError 503. Every method
    raises ApiError 503 if no reply arrives; time during which the weights change does not count.

    """

    def __init__(
        self,
        send: Callable[[EngineCall], None],
        timeout: float = CALL_SECONDS,
        adapter_timeout: float = ADAPTER_SECONDS,
    ) -> None:
        self._send = send
        self._timeout = timeout
        self._adapter_timeout = adapter_timeout
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[EngineReply | Heartbeat]] = {}
        self._reads: dict[int, int] = {}
        """Open calls that only read, by number, with the heartbeats that have come during a change of the weights."""
        self._limits: dict[int, tuple[asyncio.Timeout, float]] = {}
        """Time limits of open calls, by number, with their seconds."""

    @property
    def num_open(self) -> int:
        """Number of calls without a reply yet."""
        return len(self._open)

    async def end_session(self, session: str, key: str = "") -> bool:
        """End a session of an API key; return False if there was none."""
        return (await self._answer(lambda call: EndSession(call, session, key))).ok

    async def set_policy(self, policy: str) -> str:
        """Change the scheduling policy.

        Return the reason if the engine refuses it, otherwise "".
        """
        answer = await self._answer(lambda call: SetPolicy(call, policy))
        return "" if answer.ok else answer.message

    async def pause(self, mode: PauseMode, refuse_new: bool, clear_cache: bool = True) -> str:
        """Pause the engine; return "" once it is paused, or the reason why it is not.

        In mode `wait` that takes as long as the running requests.
        """
        timeout = None if mode == "wait" else self._timeout
        reply = await self._ask(lambda call: Pause(call, mode, refuse_new, clear_cache), timeout)
        assert isinstance(reply, Answer), reply
        return "" if reply.ok else reply.message

    async def resume(self) -> None:
        """Resume the engine if it is paused."""
        await self._answer(Resume)

    async def reset_prefix_cache(self) -> str:
        """Drop unused KV from the prefix cache; return "", or the reason why that is not possible."""
        answer = await self._answer(ResetPrefixCache)
        return "" if answer.ok else answer.message

    async def update_weights(self, make: Callable[[int], UpdateCall]) -> str:
        """Carry out a call of a trainer; return "", or the reason why it failed.

        It takes as long as the trainer sends, up to --update-timeout of the engine. make: returns the command, given
        its number.
        """
        reply = await self._ask(make, None)
        assert isinstance(reply, Answer), reply
        return "" if reply.ok else reply.message

    def refuse_update(self) -> None:
        """Tell the engine of a trainer's call for tensors that was refused. Its reply is ignored.

        The engine may be receiving weights now, so it is not awaited.
        """
        with suppress(ApiError):  # An engine that cannot be reached receives nothing either.
            self._send(UpdateWeights(next(self._numbers), [], [], [], is_refused=True))

    async def load_adapter(self, name: str, path: str, replaces: bool, root: str) -> str:
        """Load an adapter; return "" once requests of all frontends may use it, or the reason why not."""
        remedy = "it may still be loading: GET /v1/models lists it once it is loaded"
        reply = await self._ask(
            lambda call: LoadAdapter(call, name, path, replaces, root), self._adapter_timeout, remedy
        )
        assert isinstance(reply, Answer), reply
        return "" if reply.ok else reply.message

    async def unload_adapter(self, name: str) -> str:
        """Unload an adapter; return "" once no request uses it, or the reason why there is none."""
        remedy = "the adapter takes no more requests, but some still use it"
        reply = await self._ask(lambda call: UnloadAdapter(call, name), self._adapter_timeout, remedy)
        assert isinstance(reply, Answer), reply
        return "" if reply.ok else reply.message

    async def swap(self, path: str, running: SwapMode, grace: float, activate: bool, version: str, root: str) -> Answer:
        """Swap weights, however long that takes. root: as in `SwapWeights`."""
        return await self._change(lambda call: SwapWeights(call, path, running, grace, activate, version, root))

    async def cancel_swap(self) -> Answer:
        """Cancel the swap in progress, which may be waiting for a load to end."""
        return await self._change(CancelSwap)

    async def inspect_swap(self) -> Answer:
        """Return the state of the swap in an answer."""
        reply = await self._read(InspectSwap)
        if isinstance(reply, Heartbeat):
            return Answer(0, True, swap=reply.swap)
        assert isinstance(reply, Answer), reply
        return reply

    async def inspect_pause(self) -> PauseFacts:
        """Return the state of the pause."""
        reply = await self._read(Inspect)
        if isinstance(reply, Inspection):
            return pause_of(reply)
        assert isinstance(reply, Heartbeat), reply
        if reply.pause is None:  # An engine of an earlier version.
            raise unavailable(_OCCUPIED)
        return reply.pause

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Answer reads by a heartbeat that was sent during a change of the weights, as the engine then cannot.

        The first one may have been sent before the call, which the engine perhaps has answered, so only the second one
        counts. Calls that change something are carried out afterwards, so their time begins again: one that fails must
        not take effect later.
        """
        if heartbeat.weights is None or heartbeat.weights.state != "changing":
            return
        now = asyncio.get_running_loop().time()
        for limit, seconds in self._limits.values():
            if not limit.expired():
                limit.reschedule(now + seconds)
        for number in self._reads:
            self._reads[number] += 1
            future = self._open[number]
            if self._reads[number] > 1 and not future.done():
                future.set_result(heartbeat)

    async def sleep(self, level: int, mode: PauseMode) -> Answer:
        """Have the engine sleep, however long its requests and the copy of its weights take."""
        return await self._change(lambda call: Sleep(call, level, mode))

    async def wake_up(self, tags: list[str]) -> Answer:
        """Wake the engine, however long its weights take. tags: empty for all."""
        return await self._change(lambda call: WakeUp(call, tags))

    async def is_sleeping(self) -> bool:
        """Return whether memory of the engine is released."""
        reply = await self._read(Inspect)
        assert isinstance(reply, Inspection | Heartbeat), reply
        return bool(reply.stats.sleeping)

    async def _change(self, make: Callable[[int], EngineCall]) -> Answer:
        reply = await self._ask(make, None)
        assert isinstance(reply, Answer), reply
        return reply

    async def inspect(self) -> Inspection:
        """Return a snapshot of the scheduler, which heartbeats lack."""
        reply = await self._read(Inspect)
        if isinstance(reply, Heartbeat):
            raise unavailable(_OCCUPIED)
        assert isinstance(reply, Inspection), reply
        return reply

    def answer(self, reply: EngineReply) -> None:
        """Complete the call of a reply, if it is still open."""
        future = self._open.get(reply.call)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: ApiError) -> None:
        """Fail all open calls, because their engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)

    async def _answer(self, make: Callable[[int], EngineCall]) -> Answer:
        reply = await self._ask(make, self._timeout)
        assert isinstance(reply, Answer), reply
        return reply

    async def _read(self, make: Callable[[int], ReadCall]) -> EngineReply | Heartbeat:
        """Return the reply to a call that only reads, or a heartbeat in its place (`note_heartbeat`)."""
        return await self._ask(make, self._timeout, is_read=True)

    async def _ask(
        self,
        make: Callable[[int], EngineCall],
        timeout: float | None,
        remedy: str = "try again later",
        *,
        is_read: bool = False,
    ) -> EngineReply | Heartbeat:
        number = next(self._numbers)
        future: asyncio.Future[EngineReply | Heartbeat] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        if is_read:
            self._reads[number] = 0
        try:
            async with asyncio.timeout(timeout) as limit:
                if timeout is not None:
                    self._limits[number] = limit, timeout
                self._send(make(number))
                return await future
        except TimeoutError:
            raise unavailable(f"the engine did not answer within {timeout:g} s; {remedy}") from None
        finally:
            del self._open[number]
            self._reads.pop(number, None)
            self._limits.pop(number, None)
