"""Grammars are compiled once here, in a process that may fail at it, before the engine gets to see them."""

import asyncio
import contextlib
import hashlib
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from frontend.errors import ApiError, unavailable
from frontend.grammar import Grammar, place_in_regex
from frontend.grammar_schema import OPTIONS, locate, with_options
from protocol.errors import ErrorCode

MAX_GRAMMAR_CHARS = 2**20
CHECK_SECONDS = 10.0
"""On the clock. The process has a limit of its own on CPU time, which ends it sooner unless the machine is busy."""
WAIT_SECONDS = 15.0
"""What a request waits for those ahead of it."""
MAX_CACHED = 1024
MAX_PLACE_CHECKS = 200
_ARGV = (sys.executable, "-m", "frontend.grammar_worker")

_REGEX_PLACE = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")
_REGEX_OTHER = re.compile(r"\(in regex\): (.*?) in regex", re.DOTALL)
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")

TOO_COMPLEX = "it takes too much time, memory or depth to compile; make it smaller or simpler"


class GrammarChecker:
    """Checks grammars one at a time, remembers what it found, and replaces a process that did not survive one."""

    def __init__(self, vocab_size: int, special: Mapping[str, int]) -> None:
        self._hello = msgspec.json.encode([vocab_size, {str(token_id): text for text, token_id in special.items()}])
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.Task[int]] = set()
        """Processes that were killed and are not gone yet."""

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
        self._end_process()
        await asyncio.gather(*self._ending)

    async def _verdict(self, text: str) -> str | None:
        key = hashlib.sha256(text.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            raise unavailable(
                "other grammars are still being compiled; try again later", ErrorCode.OVERLOADED
            ) from None
        try:
            # Somebody may have asked the same meanwhile.
            verdict = self._known[key] if key in self._known else await self._ask(text)
        finally:
            self._lock.release()
        # Also what was too complex: to ask again would cost as much.
        self._known[key] = verdict
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        return verdict

    async def _ask(self, text: str) -> str | None:
        """One question to the process; what it does not survive, it cannot compile."""
        process = self._process
        if process is None or process.returncode is not None:
            self._end_process()
            process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        try:
            process.stdin.write(msgspec.json.encode([text]) + b"\n")
            async with asyncio.timeout(CHECK_SECONDS):
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise unavailable(
                "the machine is too busy to compile a grammar; try again later", ErrorCode.OVERLOADED
            ) from None
        finally:
            # Whoever asks next must not get this answer.
            if not answer:
                self._end_process()
        return TOO_COMPLEX if not answer else msgspec.json.decode(answer, type=tuple[str | None])[0]

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # A session of its own: an interrupt from the terminal is not meant for it.
        process = await asyncio.create_subprocess_exec(
            *_ARGV, stdin=pipe, stdout=pipe, limit=2 * MAX_GRAMMAR_CHARS, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._hello + b"\n")
        self._process = process
        return process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            gone = asyncio.create_task(process.wait())
            self._ending.add(gone)
            gone.add_done_callback(self._ending.discard)

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
