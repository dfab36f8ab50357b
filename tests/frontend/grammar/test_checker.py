"""Results and error places of grammar checks, and how concurrent checks affect each other."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar import checker as checker_module
from tandem.frontend.grammar import process as process_module
from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.grammar import Grammar, lark, output_grammar, schema_grammar
from tandem.frontend.grammar.process import OUT_OF_STACK, too_slow
from tests.fakes.grammar_compiler import ImpatientCompiler
from tests.support.serving import until
from tests.support.stopped_process import stop_group

SPECIAL = {"<|end|>": 7}
FINE = Grammar(lark("start: /a+/"), "grammar", "'grammar'")
NOWHERE = Grammar(lark("start: nowhere"), "grammar", "'grammar'")
ENDLESS = schema_grammar(
    {"allOf": [{"type": "integer", "multipleOf": 7919}, {"type": "integer", "multipleOf": 7907}]}, "p", "'p'"
)
"""Multiples of the product of two primes: as many states as that."""
OVERFLOWING = Grammar(
    lark("start: A0\n" + "\n".join(f'A{i}: A{i + 1} "x"' for i in range(20_000)) + '\nA20000: "x"'), "p", "'p'"
)


@pytest.fixture(autouse=True)
def patient_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit on CPU time end a hostile grammar, however long that takes on a loaded machine."""
    monkeypatch.setattr(process_module, "CHECK_SECONDS", 200.0)


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


def pids(checker: GrammarChecker) -> list[int]:
    """Return the ids of the processes that are running and idle."""
    idle = [process for lane in checker._lanes for process in lane._idle]
    return [process.pid for process in checker._processes if process in idle and process.pid is not None]


def pid(checker: GrammarChecker) -> int:
    (only,) = pids(checker)
    return only


def compiling(pid: int) -> int:
    """Return the id of the child that compiles for a process."""
    until(lambda: len(psutil.Process(pid).children()) == 1, "one child")
    return psutil.Process(pid).children()[0].pid


def named(letter: str) -> Grammar:
    return Grammar(lark(f"start: /{letter}/"), "p", "'p'")


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
        "at #/$defs/c: Unsatisfiable schema: minimum (2) is greater than maximum (1)",
    ),
    ({"schema": {"oneOf": [{"type": "object"}, {"minProperties": 1}]}}, "at #: oneOf constraints are not supported"),
]  # fmt: skip


def test_error_names_the_place_in_the_grammar() -> None:
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


def test_one_process_checks_many_grammars() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        first = pid(checker)
        for special in ("<|end|>", "<[7]>", "<[499]>"):
            await checker.check(Grammar(lark(f"start: {special}"), "grammar", "'grammar'"))
        assert pid(checker) == first

    with_checker(body)


def test_results_are_cached() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        first = await refusal(checker, NOWHERE)
        stop_group(pid(checker))  # any further request to it would hang
        await checker.check(FINE)
        assert str(await refusal(checker, NOWHERE)) == str(first)

    with_checker(body)


def test_least_recently_used_results_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_CACHED", 2)

    async def body(checker: GrammarChecker) -> None:
        for letter in "abc":
            await checker.check(named(letter))
        assert len(checker._checked) == 2

    with_checker(body)


def test_slow_grammar_does_not_block_others() -> None:
    """Nor do many requests with the same one."""

    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        stopped = stop_group(pid(checker))
        slow = [asyncio.create_task(checker.check(named("s"))) for _ in range(5)]
        await asyncio.sleep(0)
        for letter in "abc":
            await checker.check(named(letter))
        assert not any(task.done() for task in slow)
        assert stopped not in pids(checker)
        os.killpg(stopped, signal.SIGCONT)
        await asyncio.gather(*slow)
        assert len(pids(checker)) == 2

    with_checker(body)


@pytest.mark.parametrize(
    ("hostile", "limit"), [(ENDLESS, too_slow(0.6)), (OVERFLOWING, OUT_OF_STACK)], ids=["endless", "overflowing"]
)
def test_grammar_that_kills_its_process_is_rejected_alone(
    hostile: Grammar, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hostile is ENDLESS:
        monkeypatch.setattr(checker_module, "SLOW_CPU_SECONDS", 0.6)

    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        first = compiling(pid(checker))
        error, _ = await asyncio.gather(refusal(checker, hostile), checker.check(named("b")))
        assert error.message == f"'p' is invalid: {limit}"
        assert error.status == 400
        assert first not in set(map(compiling, pids(checker)))
        await checker.check(named("c"))

    with_checker(body)


def test_each_dead_child_is_replaced_by_one_of_the_same_process() -> None:
    async def body(checker: GrammarChecker) -> None:
        await asyncio.gather(*(checker.check(named(letter)) for letter in "ab"))
        before = pids(checker)
        assert len(before) == checker_module.NUM_FAST == 2
        children = set(map(compiling, before))
        assert (await refusal(checker, OVERFLOWING)).status == 400
        await asyncio.gather(*(checker.check(named(letter)) for letter in "cd"))
        assert set(before) <= set(pids(checker))
        assert len(children & set(map(compiling, before))) == 1

    with_checker(body)


def test_grammar_over_the_first_budget_passes_in_the_next_lane() -> None:
    async def body(checker: GrammarChecker) -> None:
        checker._lanes[0]._idle[:] = [ImpatientCompiler()]
        await checker.check(FINE)
        assert pids(checker) == [checker._processes[checker_module.NUM_FAST].pid]
        checker._lanes[1]._idle[:] = [ImpatientCompiler()]
        await checker.check(named("b"))
        assert pids(checker) == [checker._processes[-1].pid]

    with_checker(body)


def test_process_has_a_low_priority_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")

    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        assert os.getpriority(os.PRIO_PROCESS, pid(checker)) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
        assert b"hush" not in Path(f"/proc/{pid(checker)}/environ").read_bytes()

    with_checker(body)


def test_waiting_too_long_for_a_process_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "WAIT_SECONDS", 0.05)

    async def body(checker: GrammarChecker) -> None:
        await asyncio.gather(*(checker.check(named(letter)) for letter in "ab"))
        stopped = [stop_group(one) for one in pids(checker)]
        ahead = [asyncio.create_task(checker.check(named(letter))) for letter in "cd"]
        await asyncio.sleep(0)
        error = await refusal(checker, named("e"))
        assert (error.status, error.code) == (429, "overloaded")
        for one in stopped:
            os.killpg(one, signal.SIGCONT)
        await asyncio.gather(*ahead)

    with_checker(body)


def test_cancelled_request_leaves_the_result_for_others() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        stopped = stop_group(pid(checker))
        given_up, other = (asyncio.create_task(refusal(checker, NOWHERE)) for _ in range(2))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        os.killpg(stopped, signal.SIGCONT)
        assert (await other).status == 400

    with_checker(body)


def test_close_does_not_wait_for_results() -> None:
    async def body(checker: GrammarChecker) -> None:
        await checker.check(FINE)
        stop_group(pid(checker))
        asked = asyncio.create_task(checker.check(named("b")))
        await asyncio.sleep(0.05)
        await checker.close()
        assert pids(checker) == []
        with pytest.raises(asyncio.CancelledError):
            await asked

    with_checker(body)


def test_too_long_grammar_is_rejected() -> None:
    async def body(checker: GrammarChecker) -> None:
        error = await refusal(checker, Grammar(lark("#" * 2**20), "grammar", "'grammar'"))
        assert "at most 1048576" in error.message
        assert pids(checker) == []

    with_checker(body)


def test_places_in_a_grammar_that_no_client_wrote_are_not_named() -> None:
    async def body(checker: GrammarChecker) -> None:
        error = await refusal(checker, Grammar(lark("start: nowhere"), "tools", "'tools'"))
        assert (error.param, error.code) == ("tools", "invalid_grammar")
        assert "column" not in error.message
        assert "column" in (await refusal(checker, NOWHERE)).message

    with_checker(body)
