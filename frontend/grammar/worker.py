"""Compile grammars in a separate process: `python -m tandem.frontend.grammar.worker`.

A hostile grammar can take unbounded time and memory or overflow the compiler's stack, which cannot be stopped within a
process. Each line on stdin is a JSON array: first `[vocab_size, {id: text}]` with the special tokens, then
`[grammar, cpu_seconds]` for each grammar. The answer to each is a line `[ending, error, cpu_seconds]`: at least one of
the first two is null, and `cpu_seconds` is the time used.

The process forks a child that compiles. A grammar that exceeds a limit on memory, stack or CPU time (SIGPROF) ends the
child; the answer is its exit status, and the process forks the next child. A fork takes milliseconds, while a new
interpreter would take longer to start than most hostile grammars may run.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import llguidance
import msgspec

from tandem.protocol.params import LEXER_STEP_FUEL, MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES, MAX_PARSER_ITEMS

MEMORY_BYTES = 2 * 2**30
STACK_BYTES = 2 * 2**20
"""Stack of the compiling thread in bytes: a quarter of the engine's, so that a grammar accepted here compiles there."""

_PR_SET_PDEATHSIG = 1

NICENESS = 10
"""Niceness of the process, so that engine and frontends run first."""

UNSATISFIABLE = "no output can ever satisfy it"


class ByteTokenizer:
    """Vocabulary of the 256 bytes and the model's special tokens, with the attributes that `TokenizerWrapper` reads.

    Special tokens keep their ids. The texts that a grammar accepts do not depend on how bytes are grouped into tokens.
    """

    bos_token_id = None

    def __init__(self, vocab_size: int, special_tokens: dict[int, str]) -> None:
        self._first_byte = max(vocab_size, max(special_tokens, default=0) + 1)
        self.tokens: Sequence[bytes] = [
            *(special_tokens.get(index, "").encode() for index in range(self._first_byte)),
            *(bytes([byte]) for byte in range(256)),
            b"<|end|>",
        ]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*special_tokens, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._first_byte + byte for byte in data]


def check(tokenizer: llguidance.LLTokenizer, grammar: str) -> str | None:
    """Compile a grammar; return the error, or None if it is valid."""
    limits = llguidance.LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=LEXER_STEP_FUEL,
        step_max_items=MAX_PARSER_ITEMS,
    )
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher.get_error()
    matcher.compute_bitmask()
    # The engine also computes the tokens that the grammar forces at the start.
    matcher.compute_ff_tokens()
    error = matcher.get_error()
    return UNSATISFIABLE if error.startswith("NoExtension") else error or None


def _compile_each(tokenizer: llguidance.LLTokenizer) -> None:
    """Answer grammars until stdin ends, then exit."""
    for line in open(0, "rb", closefd=False):  # noqa: SIM115  (the parent's reader may have buffered data)
        grammar, cpu_seconds = msgspec.json.decode(line, type=tuple[str, float])
        # The signal ends the process even if native code holds the interpreter lock.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        began = time.process_time()
        error = check(tokenizer, grammar)
        seconds = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(None, error, seconds)
    os._exit(0)


def _answer(ending: int | None, error: str | None, seconds: float) -> None:
    sys.stdout.buffer.write(msgspec.json.encode([ending, error, seconds]) + b"\n")
    sys.stdout.buffer.flush()


def _run_child(tokenizer: llguidance.LLTokenizer, parent: int) -> NoReturn:
    """Compile in a thread with a small stack; never return to the parent's code."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # otherwise the parent ended before prctl
            thread = threading.Thread(target=_compile_each, args=[tokenizer])
            thread.start()
            thread.join()
    finally:
        os._exit(1)


def serve(tokenizer: llguidance.LLTokenizer) -> None:
    """Fork children that compile, one at a time.

    A child runs until a grammar ends it; the answer to that grammar is its exit status.
    """
    parent = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            _run_child(tokenizer, parent)
        ending = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ending == 0:
            return
        _answer(ending, None, 0.0)


def main() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    # Unbuffered: a buffer would consume a part of the first grammar.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        hello = lines.readline()
    vocab_size, special_tokens = msgspec.json.decode(hello, type=tuple[int, dict[int, str]])
    vocabulary = llguidance.TokenizerWrapper(ByteTokenizer(vocab_size, special_tokens))
    serve(llguidance.LLTokenizer(vocabulary, slices=[]))


if __name__ == "__main__":
    main()
