"""Grammars are compiled once here, in processes that may fail at it, before the engine gets to see them."""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.frontend.errors import ApiError, unavailable
from tandem.frontend.grammar.grammar import Grammar, place_in_regex
from tandem.frontend.grammar.json_schema import OPTIONS, locate, with_options
from tandem.frontend.grammar.process import MAX_GRAMMAR_CHARS, TOO_COMPLEX, GrammarProcess
from tandem.protocol.errors import ErrorCode

PROCESSES = 2
"""How many work side by side, so that one slow grammar does not hold the others up."""
WAIT_SECONDS = 15.0
"""What a request waits for those ahead of it."""
MAX_CACHED = 1024
MAX_PLACE_CHECKS = 200

_REGEX_PLACE = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")
_REGEX_OTHER = re.compile(r"\(in regex\): (.*?) in regex", re.DOTALL)
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


class GrammarChecker:
    """Checks grammars in a few processes and remembers what it found."""

    def __init__(self, vocab_size: int, special: Mapping[str, int]) -> None:
        hello = msgspec.json.encode([vocab_size, {str(token_id): text for text, token_id in special.items()}])
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[str | None]] = {}
        self._free = asyncio.Semaphore(PROCESSES)
        self._idle = [GrammarProcess(hello) for _ in range(PROCESSES)]
        """The one that was used last is at the end, and used next: no more are started than are needed."""

    async def check(self, grammar: Grammar) -> None:
        """Raises ApiError 400 for a grammar that cannot be compiled, naming the place, and 503 where too many others
        are waiting to be."""
        text = grammar.text
        if len(text) > MAX_GRAMMAR_CHARS:
            raise _refused(grammar, f": {len(text)} characters, at most {MAX_GRAMMAR_CHARS}; make it smaller")
        error = await self._verdict(text)
        if error is not None:
            raise _refused(grammar, await self._explain(grammar, error))

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._idle))

    async def _verdict(self, text: str) -> str | None:
        key = hashlib.sha256(text.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        # Many requests with the same slow grammar take up one process.
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask(key, text))
            self._asking[key].add_done_callback(lambda task: self._asked(key, task))
        return await asyncio.shield(self._asking[key])

    async def _ask(self, key: bytes, text: str) -> str | None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable(
                "other grammars are still being compiled; try again later", ErrorCode.OVERLOADED
            ) from None
        process = self._idle.pop()
        try:
            verdict = await process.ask(text)
        finally:
            self._idle.append(process)
            self._free.release()
        # Also what was too complex: to ask again would cost as much.
        self._known[key] = verdict
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        return verdict

    def _asked(self, key: bytes, task: asyncio.Task[str | None]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits for it any more

    async def _explain(self, grammar: Grammar, error: str) -> str:
        """The error for people, with its place in the source."""
        if grammar.schema is not None and error != TOO_COMPLEX:
            found = _REGEX_PLACE.search(error)
            reason = f"invalid pattern: {found[2]}" if found else _first_line(error)
            return f" at {await self._place(grammar.schema, error)}: {reason}"
        if grammar.regex is not None:
            return _explain_regex(grammar.regex, error)
        if place := _LARK_PLACE.match(error):
            return f" at line {place[1]}, column {place[2]}: {_first_line(error[place.end() :])}"
        return f": {_first_line(error)}"

    async def _place(self, schema: dict[str, Any], error: str) -> str:
        left = MAX_PLACE_CHECKS

        async def fails_alike(part: dict[str, Any]) -> bool:
            nonlocal left
            left -= 1
            return (
                left >= 0
                and await self._verdict(Grammar({"json_schema": with_options(part, OPTIONS)}, "", "").text) == error
            )

        return await locate(schema, fails_alike)


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:500]


def _explain_regex(regex: str, error: str) -> str:
    if found := _REGEX_PLACE.search(error):
        return f" at character {place_in_regex(regex, len(found[1]))}: {found[2][:200]}"
    if found := _REGEX_OTHER.search(error):
        return f": {_first_line(found[1])}"
    return f": {_first_line(_LARK_PLACE.sub('', error, count=1))}"


def _refused(grammar: Grammar, reason: str) -> ApiError:
    code = "invalid_grammar" if grammar.schema is None else "invalid_json_schema"
    return ApiError(400, f"{grammar.name} is invalid{reason}", grammar.param, code)
