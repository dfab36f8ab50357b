"""A program that compiles grammars to see whether they can be: `python -m tandem.frontend.grammar.worker`.

It is a process of its own because a hostile grammar can take any time and memory, or overflow the compiler's stack, and
none of these can be stopped within a process. Each line on stdin is a JSON array: first `[vocab_size, {id: text}]` with
the special tokens, then one `[grammar]` each. Each grammar is answered by a line `[error or null]`. The limits on
memory and time end the program.
"""

import math
import resource
import sys
import threading
from collections.abc import Sequence

import llguidance
import msgspec

from tandem.protocol.params import LEXER_STEP_FUEL, MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES

CPU_SECONDS = 2
MEMORY_BYTES = 2 * 2**30
STACK_BYTES = 2 * 2**20
"""A quarter of what a thread has elsewhere, so that what passes here leaves the engine's stack room."""


UNSATISFIABLE = "no output can ever satisfy it"


class ByteTokenizer:
    """A vocabulary of bytes, and of the special tokens of the model under their own ids: what a grammar of text can
    or cannot do does not depend on how its bytes are grouped. Has the attributes that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocab_size: int, special: dict[int, str]) -> None:
        self._first_byte = max(vocab_size, max(special, default=0) + 1)
        self.tokens: Sequence[bytes] = [
            *(special.get(index, "").encode() for index in range(self._first_byte)),
            *(bytes([byte]) for byte in range(256)),
            b"<|end|>",
        ]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._first_byte + byte for byte in data]


def check(tokenizer: llguidance.LLTokenizer, grammar: str) -> str | None:
    """What is wrong with a grammar, or None."""
    limits = llguidance.LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS, max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=LEXER_STEP_FUEL
    )
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher.get_error()
    matcher.compute_bitmask()
    # What is forced at the beginning is worked out by the engine, too.
    matcher.compute_ff_tokens()
    error = matcher.get_error()
    return UNSATISFIABLE if error.startswith("NoExtension") else error or None


def _allow_seconds(seconds: int) -> None:
    """Sets the CPU time that this process has left; the kernel ends it beyond."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _serve() -> None:
    lines = sys.stdin.buffer
    vocab_size, special = msgspec.json.decode(lines.readline(), type=tuple[int, dict[int, str]])
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokenizer(vocab_size, special)), slices=[])
    for line in lines:
        (grammar,) = msgspec.json.decode(line, type=tuple[str])
        _allow_seconds(CPU_SECONDS)
        answer = msgspec.json.encode([check(tokenizer, grammar)])
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
