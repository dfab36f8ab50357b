"""The process that compiles grammars: verdicts with their places, and grammars that it does not survive."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from frontend import grammar_check
from frontend.errors import ApiError
from frontend.grammar import Grammar, lark, output_grammar, schema_grammar
from frontend.grammar_check import GrammarChecker

SPECIAL = {"<|end|>": 7}
FINE = Grammar(lark("start: /a+/"), "grammar", "'grammar'")
ENDLESS = schema_grammar(
    {"allOf": [{"type": "integer", "multipleOf": 7919}, {"type": "integer", "multipleOf": 7907}]}, "p", "'p'"
)
"""Multiples of the product of two primes: as many states as that."""
OVERFLOWING = Grammar(
    lark("start: A0\n" + "\n".join(f'A{i}: A{i + 1} "x"' for i in range(20_000)) + '\nA20000: "x"'), "p", "'p'"
)


def with_checker(body: Callable[[GrammarChecker], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        checker = GrammarChecker(500, SPECIAL)
        try:
            await body(checker)
        finally:
            await checker.close()

    asyncio.run(run())


async def refusal(checker: GrammarChecker, grammar: Grammar) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await checker.check(grammar)
    return caught.value


def pid(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


NOTHING = {"type": "number", "minimum": 2, "maximum": 1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "ab(c"}, "'regex' is invalid at character 2: unclosed group"),
    ({"regex": "a/b\n[z-a]"}, "'regex' is invalid at character 5: invalid character class range"),
    ({"regex": "a(?!b)"}, "'regex' is invalid at character 1: look-around"),
    ({"regex": "a^b"}, "'regex' is invalid: lookarounds not supported yet; Start"),
    ({"regex": r"(a)\1"}, "'regex' is invalid at character 3: backreferences are not supported"),
    ({"grammar": 'start: "a" b\nc: "d"'}, "'grammar' is invalid at line 1, column 8: unknown name"),
    ({"grammar": 'start: "a"\nb: (\n'}, "'grammar' is invalid at line 2, column 5: Expected token"),
    ({"grammar": "{}"}, "'grammar' is invalid at line 1, column 1"),
    ({"grammar": "start: <|nope|>"}, "'grammar' is invalid at line 1, column 8: unknown special token"),
    ({"grammar": "start: <[500000]>"}, "'grammar' is invalid at line 1, column 8: Token range end too large"),
    ({"grammar": 'start: A\nA: "a" & "b"'}, "'grammar' is invalid: no output can ever satisfy it"),
    ({"schema": {"items": {"pattern": "(", "type": "string"}}}, "at #/items: invalid pattern: unclosed group"),
    (
        {"schema": {"properties": {"b": {"$ref": "#/$defs/c"}}, "required": ["b"], "$defs": {"c": NOTHING}}},
        "at #/properties/b: Unsatisfiable schema: minimum (2) is greater than maximum (1)",
    ),
    ({"schema": {"oneOf": [{"type": "object"}, {"minProperties": 1}]}}, "at #: oneOf constraints are not supported"),
]  # fmt: skip


def test_what_is_refused_has_its_place() -> None:
    async def body(checker: GrammarChecker) -> None:
        for fields, text in REFUSED:
            schema = fields.get("schema")
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            made = output_grammar(form if schema else None, fields.get("regex"), (), fields.get("grammar"))
            assert made is not None
            error = await refusal(checker, made)
            assert text in error.message
            assert "\n" not in error.message
            assert (error.status, error.param) == (400, made.param)
            assert error.code == ("invalid_grammar" if made.schema is None else "invalid_json_schema")

    with_checker(body)


def test_one_process_takes_many() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        first = pid(checker)
        for special in ("<|end|>", "<[7]>", "<[499]>"):
            await checker.check(Grammar(lark(f"start: {special}"), "grammar", "'grammar'"))
        assert pid(checker) == first

    with_checker(body)


def test_verdicts_are_remembered() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        broken = Grammar(lark("start: nowhere"), "grammar", "'grammar'")
        first = await refusal(checker, broken)
        os.kill(pid(checker), signal.SIGSTOP)  # whoever asks it now would wait
        await checker.check(FINE)
        assert str(await refusal(checker, broken)) == str(first)

    with_checker(body)


def test_the_oldest_verdicts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_CACHED", 2)

    async def body(checker: GrammarChecker) -> None:
        for letter in "abc":
            await checker.check(Grammar(lark(f'start: "{letter}"'), "p", "'p'"))
        assert len(checker._known) == 2

    with_checker(body)


@pytest.mark.parametrize("hostile", [ENDLESS, OVERFLOWING], ids=["endless", "overflowing"])
def test_a_grammar_that_ends_the_process_is_refused_and_no_other(hostile: Grammar) -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        first = pid(checker)
        error, _ = await asyncio.gather(
            refusal(checker, hostile), checker.check(Grammar(lark("start: /b/"), "grammar", "'grammar'"))
        )
        assert error.message == f"'p' is invalid: {grammar_check.TOO_COMPLEX}"
        assert error.status == 400
        await checker.check(Grammar(lark("start: /c/"), "grammar", "'grammar'"))
        assert pid(checker) != first

    with_checker(body)


def test_a_process_that_was_killed_is_replaced() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        process = checker._process
        assert process is not None
        process.kill()
        await process.wait()
        await checker.check(Grammar(lark("start: /b/"), "grammar", "'grammar'"))

    with_checker(body)


def test_a_process_that_hangs_is_503_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        os.kill(pid(checker), signal.SIGSTOP)
        other = Grammar(lark("start: /b/"), "grammar", "'grammar'")
        monkeypatch.setattr(grammar_check, "CHECK_SECONDS", 0.1)
        error = await refusal(checker, other)
        assert (error.status, error.code) == (503, "overloaded")
        monkeypatch.undo()
        await checker.check(other)

    with_checker(body)


def test_whoever_waits_too_long_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "WAIT_SECONDS", 0.05)

    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        os.kill(pid(checker), signal.SIGSTOP)
        ahead = asyncio.create_task(checker.check(Grammar(lark("start: /b/"), "p", "'p'")))
        await asyncio.sleep(0)
        error = await refusal(checker, Grammar(lark("start: /c/"), "p", "'p'"))
        assert error.status == 503
        os.kill(pid(checker), signal.SIGCONT)
        await ahead

    with_checker(body)


def test_an_answer_that_nobody_waits_for_reaches_nobody_else() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        os.kill(pid(checker), signal.SIGSTOP)
        given_up = asyncio.create_task(checker.check(Grammar(lark("start: nowhere"), "p", "'p'")))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await checker.check(Grammar(lark("start: /d/"), "p", "'p'"))

    with_checker(body)


def test_a_grammar_that_is_too_long() -> None:
    async def body(checker: GrammarChecker) -> None:
        error = await refusal(checker, Grammar(lark("#" * 2**20), "grammar", "'grammar'"))
        assert "at most 1048576" in error.message
        assert checker._process is None

    with_checker(body)
