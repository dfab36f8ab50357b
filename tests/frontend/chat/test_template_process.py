"""The process that renders chat templates: how it ends, and what becomes of the conversations that wait."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.chat import template_process
from tandem.frontend.chat.render_frames import MEMORY_BYTES, RenderRequest, Templates, json_frame
from tandem.frontend.chat.render_queue import MAX_SENT
from tandem.frontend.chat.template_process import MAX_TICKS, TemplateProcess
from tandem.frontend.chat.template_sandbox import RenderError
from tandem.frontend.errors import ApiError
from tandem.frontend.metrics.frontend_metrics import TemplateMetrics
from tests.support.stopped_process import stop_process

NEVER = 10_000.0
"""Seconds between two ticks of a process whose ticks are the test's."""
TEMPLATE = "{{ raise_exception(text) if fails else text }}"


def with_process(
    body: Callable[[TemplateProcess, CollectorRegistry], Coroutine[Any, Any, None]], template: str = TEMPLATE
) -> None:
    async def run() -> None:
        registry = CollectorRegistry()
        templates = json_frame(Templates({"default": template}, {"bos_token": "<b>"}))
        process = TemplateProcess(templates, TemplateMetrics(registry), NEVER)
        try:
            await body(process, registry)
        finally:
            await process.close()
        assert process.pid is None

    asyncio.run(run())


def asked(text: Any, **variables: Any) -> bytes:
    return json_frame(RenderRequest("default", {"text": text, **variables}))


def restarts(registry: CollectorRegistry) -> dict[str, float]:
    return {
        reason: value
        for reason in ("time", "ended")
        if (value := registry.get_sample_value("tandem_template_process_restarts_total", {"reason": reason}))
    }


def stop(process: TemplateProcess) -> int:
    assert process.pid is not None
    return stop_process(process.pid)


async def let_time_pass(process: TemplateProcess) -> None:
    """Let the process take longer than any conversation may."""
    for _ in range(MAX_TICKS + 1):
        process._tick()


def test_process_starts_with_the_first_conversation_and_renders_many() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        assert process.pid is None
        texts = [f"{number} ü 🙂" for number in range(50)]
        assert await asyncio.gather(*(process.render(asked(text)) for text in texts)) == texts
        first = process.pid
        large = "é" * 2**22
        assert await process.render(asked(large)) == large
        assert await process.render(asked(2**70)) == str(2**70)
        assert process.pid == first is not None
        assert restarts(registry) == {}

    with_process(body)


def test_failure_of_a_template_costs_no_process() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        with pytest.raises(RenderError, match=r"^roles must alternate$"):
            await process.render(asked("roles must alternate", fails=True))
        with pytest.raises(RenderError, match="surrogate"):
            await process.render(asked("%c", letter=0xD800))
        assert await process.render(asked("b", letter=98)) == "b"
        assert restarts(registry) == {}

    with_process(body, "{{ text % letter if letter and text == '%c' else " + TEMPLATE.removeprefix("{{ "))


def test_conversation_that_takes_too_long_costs_one_process_and_no_other_conversation() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        stopped = stop(process)
        slow, *others = (asyncio.create_task(process.render(asked(text))) for text in "bcd")
        await asyncio.sleep(0)
        await let_time_pass(process)
        with pytest.raises(RenderError, match=r"\b5 s\b"):
            await slow
        assert await asyncio.gather(*others) == ["c", "d"]
        assert process.pid != stopped
        assert restarts(registry) == {"time": 1.0}

    with_process(body)


def test_conversation_whose_process_is_killed_once_is_rendered_by_the_successor() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        stopped = stop(process)
        first, other = (asyncio.create_task(process.render(asked(text))) for text in "bc")
        await asyncio.sleep(0)
        os.kill(stopped, signal.SIGKILL)
        assert await asyncio.gather(first, other) == ["b", "c"]
        assert restarts(registry) == {"ended": 1.0}

    with_process(body)


def test_conversation_that_ends_its_process_and_the_successor_is_a_500_and_others_are_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = (
        "import os; from tandem.frontend.chat import render_worker\n"
        "answer = render_worker.answer\n"
        "render_worker.answer = lambda *given: os.kill(os.getpid(), 9) if b'guilty' in given[1] else answer(*given)\n"
        "render_worker.main()"
    )
    monkeypatch.setattr(template_process, "_ARGV", (template_process._ARGV[0], "-c", program))

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        texts = ["b", "guilty", "c", "d"]
        tasks = [asyncio.create_task(process.render(asked(text))) for text in texts]
        guilty = tasks[1]
        with pytest.raises(ApiError, match="SIGKILL") as caught:
            await guilty
        assert (caught.value.status, caught.value.code) == (500, "template_process_failed")
        assert await asyncio.gather(*(task for task in tasks if task is not guilty)) == ["b", "c", "d"]
        assert restarts(registry) == {"ended": 2.0}

    with_process(body)


def test_conversations_of_one_key_delay_those_of_another_by_a_few() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        stopped = stop(process)
        done: list[str] = []

        async def render(client: str) -> None:
            await process.render(asked("b"), client)
            done.append(client)

        tasks = [asyncio.create_task(render(client)) for client in ["many"] * 40 + ["one"]]
        await asyncio.sleep(0)
        os.kill(stopped, signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert done.index("one") <= MAX_SENT + 1
        assert restarts(registry) == {}

    with_process(body)


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT])
def test_conversation_that_crashes_its_process_is_a_failure_of_the_template(fault: signal.Signals) -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        stopped = stop(process)
        guilty, other = (asyncio.create_task(process.render(asked(text))) for text in "bc")
        await asyncio.sleep(0)
        os.kill(stopped, fault)
        os.kill(stopped, signal.SIGCONT)
        with pytest.raises(RenderError, match=rf"\b{fault.name}\b"):
            await guilty
        assert await other == "c"
        assert restarts(registry) == {"ended": 1.0}

    with_process(body)


def test_conversation_that_leaves_no_memory_to_answer_is_a_failure_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process ends with the exit code that says so."""
    program = (
        "import sys; from tandem.frontend.chat import render_worker\n"
        "def answer(*_): raise MemoryError\n"
        "render_worker.answer = answer; render_worker.main()"
    )
    monkeypatch.setattr(template_process, "_ARGV", (template_process._ARGV[0], "-c", program))

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        with pytest.raises(RenderError, match=r"\b2048\b"):
            await process.render(asked("a"))
        assert restarts(registry) == {"ended": 1.0}

    with_process(body)


def test_template_at_the_limit_of_memory_fails_and_the_process_goes_on() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        with pytest.raises(RenderError, match="memory"):
            await process.render(asked("", size=MEMORY_BYTES))
        assert await process.render(asked("a", size=1)) == "1"
        assert restarts(registry) == {}

    with_process(body, "{{ (1).to_bytes(size, 'big') | length }}")


def test_json_of_deeply_nested_lists_is_stopped_and_others_are_rendered() -> None:
    """One call of a filter, which nothing within the process stops: a list that holds itself 2^40 times over."""

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        assert await process.render(asked("a")) == "a"
        nested = asyncio.create_task(process.render(asked("", nests=40)))
        other = asyncio.create_task(process.render(asked("b")))
        await asyncio.sleep(0)
        await let_time_pass(process)
        with pytest.raises(RenderError, match=r"\b5 s\b"):
            await nested
        assert await other == "b"
        assert restarts(registry) == {"time": 1.0}

    with_process(
        body,
        "{% if nests %}{% set ns = namespace(x=[text]) %}{% for _ in range(nests) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x | tojson }}{% endif %}{{ text }}",
    )


def test_body_of_the_greatest_size_stays_within_the_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character outside of Latin-1 makes each of the others take four bytes."""
    monkeypatch.setattr(template_process, "MAX_TICKS", 1000)  # a busy machine may take longer than is allowed

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        text = "a" * (32 * 2**20 - 4) + "🙂"
        assert await process.render(asked(text)) == f"<b>{text}\n"
        assert restarts(registry) == {}

    with_process(body, "{{ bos_token ~ text | trim ~ '\n' }}")


@pytest.mark.parametrize("was_asked", [False, True])
def test_process_that_is_killed_between_conversations_is_an_error_of_the_log(
    caplog: pytest.LogCaptureFixture, was_asked: bool
) -> None:
    async def body(process: TemplateProcess, _: CollectorRegistry) -> None:
        process.start()
        if was_asked:
            await process.render(asked("a"))
        async with asyncio.timeout(120):
            while process._connection is None:
                await asyncio.sleep(0.01)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            while not any(record.levelname == "ERROR" for record in caplog.records):
                await asyncio.sleep(0.01)
        assert await process.render(asked("b"))

    with_process(body)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "SIGKILL" in error.getMessage()


def test_log_tells_a_slow_conversation_from_a_process_that_ended_and_repeats_its_stderr(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; print('hello', file=sys.stderr); from tandem.frontend.chat.render_worker import main; main()"
    monkeypatch.setattr(template_process, "_ARGV", (template_process._ARGV[0], "-c", program))
    caplog.set_level("DEBUG")

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        for ends in (False, True):
            await process.render(asked("a"))
            stopped = stop(process)
            guilty = asyncio.create_task(process.render(asked("b")))
            await asyncio.sleep(0)
            await (let_time_pass(process) if not ends else asyncio.to_thread(os.kill, stopped, signal.SIGKILL))
            await asyncio.gather(guilty, return_exceptions=True)
        assert restarts(registry) == {"time": 1.0, "ended": 1.0}

    with_process(body)
    levels = {record.getMessage().split(" with signal ")[-1]: record.levelname for record in caplog.records}
    assert levels["SIGKILL while it rendered a conversation"] == "ERROR"
    assert "a conversation took more than" in caplog.text
    assert "ended with signal SIGKILL while it rendered a conversation" in caplog.text
    assert "the template renderer: hello" in caplog.text


def test_conversation_that_was_given_up_is_not_answered_to_the_next() -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        stopped = stop(process)
        given_up, other = (asyncio.create_task(process.render(asked(text))) for text in "bc")
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        os.kill(stopped, signal.SIGCONT)
        assert await other == "c"
        assert restarts(registry) == {}

    with_process(body)


def test_process_that_cannot_start_fails_what_waits_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        works = template_process._ARGV
        for argv, reason in (((works[0], "-c", "raise SystemExit(3)"), "exit code 3"), (("/nowhere",), "ended with")):
            monkeypatch.setattr(template_process, "_ARGV", argv)
            waiting = [asyncio.create_task(process.render(asked(text))) for text in "ab"]
            for one in waiting:
                with pytest.raises(ApiError, match=reason) as caught:
                    await one
                assert caught.value.status == 500
        monkeypatch.setattr(template_process, "_ARGV", works)
        assert await process.render(asked("c")) == "c"
        assert restarts(registry) == {}

    with_process(body)


def test_process_that_ends_while_it_starts_costs_no_conversation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = """
import os, signal, sys
from pathlib import Path
if not Path(sys.argv[1]).exists():
    Path(sys.argv[1]).touch()
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        python, *worker = template_process._ARGV
        monkeypatch.setattr(template_process, "_ARGV", (python, "-c", program, str(tmp_path / "began"), *worker))
        assert await asyncio.gather(*(process.render(asked(text)) for text in "abc")) == ["a", "b", "c"]
        assert (tmp_path / "began").exists()
        assert restarts(registry) == {}

    with_process(body)


def test_process_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")

    async def body(process: TemplateProcess, registry: CollectorRegistry) -> None:
        await process.render(asked("a"))
        assert b"hush" not in Path(f"/proc/{process.pid}/environ").read_bytes()
        assert restarts(registry) == {}

    with_process(body)
