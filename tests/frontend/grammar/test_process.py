"""The process that compiles grammars: how it ends, and what is asked of the next."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.grammar import process as grammar_process
from tandem.frontend.grammar.grammar import Grammar, lark
from tandem.frontend.grammar.process import GrammarProcess
from tests.support.stopped_process import stop_group


def text(source: str) -> str:
    return Grammar(lark(source), "p", "'p'").text


FINE, WRONG = text("start: /a/"), text("start: nowhere")


def with_process(body: Callable[[GrammarProcess], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        process = GrammarProcess(b"[500, {}]")
        try:
            await body(process)
        finally:
            await process.close()

    asyncio.run(run())


def stop(process: GrammarProcess) -> int:
    assert process.pid is not None
    return stop_group(process.pid)


def test_process_starts_on_first_use_and_checks_many_grammars() -> None:
    async def body(process: GrammarProcess) -> None:
        assert process.pid is None
        assert (await process.ask(FINE, 3.0)).error is None
        first = process.pid
        assert "unknown name" in ((await process.ask(WRONG, 3.0)).error or "")
        assert process.pid == first is not None

    with_process(body)


def test_killed_process_is_replaced_and_an_error_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body(process: GrammarProcess) -> None:
        await process.ask(FINE, 3.0)
        assert process._process is not None
        process._process.kill()
        await process._process.wait()
        assert (await process.ask(FINE, 3.0)).error is None

    with_process(body)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "SIGKILL" in record.getMessage()


@pytest.mark.parametrize("victim", ["program", "child"])
def test_check_whose_process_is_killed_is_429_and_the_next_one_passes(victim: str) -> None:
    async def body(process: GrammarProcess) -> None:
        await process.ask(FINE, 3.0)
        program = stop(process)
        (child,) = psutil.Process(program).children()
        asked = asyncio.create_task(process.ask(FINE, 3.0))
        await asyncio.sleep(0)
        if victim == "program":
            os.killpg(program, signal.SIGKILL)  # with its child, which might answer in its last moment
        else:
            os.kill(child.pid, signal.SIGKILL)
            os.killpg(program, signal.SIGCONT)
        with pytest.raises(ApiError, match="SIGKILL") as caught:
            await asked
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert (await process.ask(FINE, 3.0)).error is None
        assert (process.pid == program) == (victim == "child")

    with_process(body)


def test_hanging_process_is_429_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(process: GrammarProcess) -> None:
        await process.ask(FINE, 3.0)
        stopped = stop(process)
        monkeypatch.setattr(grammar_process, "CHECK_SECONDS", 0.1)
        with pytest.raises(ApiError) as caught:
            await process.ask(FINE, 3.0)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        monkeypatch.undo()
        assert (await process.ask(FINE, 3.0)).error is None
        assert process.pid != stopped

    with_process(body)


def test_answer_of_a_cancelled_check_reaches_no_other_check() -> None:
    async def body(process: GrammarProcess) -> None:
        await process.ask(FINE, 3.0)
        stop(process)
        given_up = asyncio.create_task(process.ask(WRONG, 3.0))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert (await process.ask(FINE, 3.0)).error is None

    with_process(body)


def test_close_leaves_no_process() -> None:
    async def body(process: GrammarProcess) -> None:
        await process.ask(FINE, 3.0)
        stopped = stop(process)
        await process.close()
        assert process.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)

    with_process(body)
