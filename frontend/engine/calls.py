"""Questions to the engine that have one answer each."""

import asyncio
import itertools
from collections.abc import Callable

from tandem.frontend.errors import ApiError, unavailable
from tandem.protocol.commands import EndSession, Inspect, SetPolicy
from tandem.protocol.events import Answer, Inspection

CALL_SECONDS = 10.0
"""After which an answer is no longer waited for: the engine answers between two steps."""

Call = EndSession | SetPolicy | Inspect
Reply = Answer | Inspection


class EngineCalls:
    """Matches replies with calls by their number, which is never used again: late replies find nobody waiting.

    `send` takes a call to the engine or raises ApiError 503; so does every method where no reply comes.
    """

    def __init__(self, send: Callable[[Call], None], timeout: float = CALL_SECONDS) -> None:
        self._send = send
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Reply]] = {}

    @property
    def num_open(self) -> int:
        """Calls without a reply yet."""
        return len(self._open)

    async def end_session(self, session: str) -> bool:
        """Forgets a session; whether there was one."""
        return (await self._answer(lambda call: EndSession(call, session))).ok

    async def set_policy(self, policy: str) -> str:
        """Has the engine schedule by another policy; why it will not, or ""."""
        answer = await self._answer(lambda call: SetPolicy(call, policy))
        return "" if answer.ok else answer.message

    async def inspect(self) -> Inspection:
        """What the scheduler holds at this moment."""
        reply = await self._ask(Inspect)
        assert isinstance(reply, Inspection), reply
        return reply

    def answer(self, reply: Reply) -> None:
        future = self._open.get(reply.call)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: ApiError) -> None:
        """Ends every open call: the engine that was asked is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)

    async def _answer(self, make: Callable[[int], Call]) -> Answer:
        reply = await self._ask(make)
        assert isinstance(reply, Answer), reply
        return reply

    async def _ask(self, make: Callable[[int], Call]) -> Reply:
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(number))
            return await asyncio.wait_for(future, self._timeout)
        except TimeoutError:
            raise unavailable(f"the engine did not answer within {self._timeout:g} s; try again later") from None
        finally:
            del self._open[number]
