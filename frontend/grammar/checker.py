"""Compile grammars in disposable child processes, to reject bad ones before they reach the engine."""

import asyncio
import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from time import monotonic

import msgspec

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar.grammar import Grammar, regex_position, schema_body
from tandem.frontend.grammar.json_schema import join_pointer, shortened
from tandem.frontend.grammar.lane import Lane
from tandem.frontend.grammar.process import (
    Checked,
    GrammarProcess,
    SlowGrammarError,
    too_slow,
)
from tandem.frontend.grammar.schema_search import SchemaSearch
from tandem.frontend.metrics.frontend_metrics import GrammarMetrics
from tandem.protocol.params import MAX_GRAMMAR_CHARS

NUM_FAST = 2
"""Number of processes of the first lane, which every grammar enters; other lanes have one process."""
FAST_CPU_SECONDS, MIDDLE_CPU_SECONDS, SLOW_CPU_SECONDS = 0.03, 0.3, 3.0
"""CPU time for one grammar in each lane.

Most grammars take 1 to 3 ms. Sixteen concurrent grammars that exceed the first budget block the first lane's two
processes for 0.24 s of CPU time each."""
WAIT_SECONDS = 15.0
"""Maximum wait of a grammar for a free process of a lane, in seconds; then its request gets a 429."""
MAX_CACHED = 1024
"""Maximum number of cached results; the least recently used are evicted."""

_REGEX_ERROR = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: (.*)")
_OTHER_REGEX_ERROR = re.compile(r"\(in regex\): (.*?) in regex", re.DOTALL)
_LARK_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


class GrammarChecker:
    """Validate grammars by compiling them in a few child processes.

    A grammar that exceeds the CPU budget of one lane moves to the next, which has ten times the budget. Slow grammars
    therefore delay only each other (multilevel feedback queue). Each lane shares its processes fairly between clients.
    Results are cached.
    `special_tokens` maps the text of the tokenizer's special tokens to their id.
    """

    def __init__(
        self, vocab_size: int, special_tokens: Mapping[str, int], metrics: GrammarMetrics | None = None
    ) -> None:
        hello = msgspec.json.encode([vocab_size, {str(token_id): text for text, token_id in special_tokens.items()}])
        self._checked: OrderedDict[bytes, Checked] = OrderedDict()
        """Results by hash of the grammar, most recently used last."""
        self._compiling: dict[bytes, asyncio.Task[Checked]] = {}
        self._processes = [GrammarProcess(hello) for _ in range(NUM_FAST + 2)]
        fast, middle, slow = self._processes[:NUM_FAST], self._processes[NUM_FAST:-1], self._processes[-1:]
        self._lanes = (
            Lane("", fast, FAST_CPU_SECONDS, WAIT_SECONDS),
            Lane("slow ", middle, MIDDLE_CPU_SECONDS, WAIT_SECONDS),
            Lane("very slow ", slow, SLOW_CPU_SECONDS, WAIT_SECONDS),
        )
        self._metrics = metrics

    async def check(self, grammar: Grammar, client: str = "") -> float:
        """Check that a grammar compiles and return its CPU time in seconds.

        Raises ApiError 400 with line and column of the error if it does not, and 429 while too many other grammars
        are being compiled.
        """
        began = monotonic()
        try:
            checked = await self.compile(grammar, client)
            if checked.error is not None:
                raise _invalid(grammar, await self._explain(grammar, checked, client))
            return checked.seconds
        finally:
            if self._metrics is not None:
                self._metrics.seconds.observe(monotonic() - began)

    async def compile(self, grammar: Grammar, client: str = "") -> Checked:
        """Compile a grammar for a client.

        Raises ApiError 400 if it is too large, and 429 while too many others are being compiled.
        """
        text = grammar.text
        if len(text) > MAX_GRAMMAR_CHARS:
            raise _invalid(grammar, f": {len(text)} characters, at most {MAX_GRAMMAR_CHARS}; make it smaller")
        return await self._compiled_once(text, client)

    def search(self, client: str = "") -> SchemaSearch:
        """Return a search for the parts of a schema that do not compile."""

        async def compile_text(text: str) -> Checked:
            return await self._compiled_once(text, client)

        return SchemaSearch(compile_text)

    async def close(self) -> None:
        """Cancel running compilations and end the processes."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(lane.close() for lane in self._lanes))

    async def _compiled_once(self, text: str, client: str) -> Checked:
        key = hashlib.sha256(text.encode()).digest()
        if key in self._checked:
            self._checked.move_to_end(key)
            return self._checked[key]
        # Concurrent requests with the same slow grammar share one process.
        if key not in self._compiling:
            self._compiling[key] = asyncio.create_task(self._compile(key, text, client))
            self._compiling[key].add_done_callback(lambda task: self._compiled(key, task))
        return await asyncio.shield(self._compiling[key])

    async def _compile(self, key: bytes, text: str, client: str) -> Checked:
        checked = Checked(too_slow(SLOW_CPU_SECONDS), is_limit=True)
        for lane in self._lanes:
            with contextlib.suppress(SlowGrammarError):
                checked = await lane.compile(client, text)
                break
        # Grammars that exceed a limit are cached, too: compiling them again would cost as much.
        self._checked[key] = checked
        if len(self._checked) > MAX_CACHED:
            self._checked.popitem(last=False)
        return checked

    def _compiled(self, key: bytes, task: asyncio.Task[Checked]) -> None:
        del self._compiling[key]
        if not task.cancelled():
            task.exception()  # Mark the exception as retrieved, in case every waiting request was cancelled.

    async def _explain(self, grammar: Grammar, checked: Checked, client: str) -> str:
        """Convert a compiler error to a message for the client, with its position in the field."""
        error = checked.error or ""
        if grammar.schema is not None and not checked.is_limit:
            alone = Grammar(schema_body(grammar.schema, as_schema=True), "", "")
            error = (await self._compiled_once(alone.text, client)).error or error
            found = _REGEX_ERROR.search(error)
            reason = f"invalid pattern: {found[2]}" if found else _first_line(error)
            path = await self.search(client).locate(grammar.schema, error)
            return f" at {shortened(join_pointer('#', *path))}: {reason}"
        if grammar.regex is not None:
            return _explain_regex(grammar.regex, error)
        found = _LARK_ERROR.match(error)
        if found is None:
            return f": {_first_line(error)}"
        # Positions only make sense to the client if it wrote the grammar text.
        position = f" at line {found[1]}, column {found[2]}" if grammar.param == "grammar" else ""
        return f"{position}: {_first_line(error[found.end() :])}"


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:500]


def _explain_regex(regex: str, error: str) -> str:
    if found := _REGEX_ERROR.search(error):
        return f" at character {regex_position(regex, len(found[1]))}: {found[2][:200]}"
    if found := _OTHER_REGEX_ERROR.search(error):
        return f": {_first_line(found[1])}"
    return f": {_first_line(_LARK_ERROR.sub('', error, count=1))}"


def _invalid(grammar: Grammar, reason: str) -> ApiError:
    code = "invalid_grammar" if grammar.schema is None else "invalid_json_schema"
    return ApiError(400, f"{grammar.name} is invalid{reason}", grammar.param, code)
