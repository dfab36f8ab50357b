"""Cost of rendering chats in a separate process, compared with a thread.

    python -m benchmarks.frontends.bench_templates [--messages 4 32 256] [--waiting 1 8] [--chats 1000] [--pairs 7]
        [--template NAME] [--save NAME]

Both render the same conversations. The process is the frontend's, called via `Chat.render`; the thread runs the same
sandbox in the calling process. CPU is the user and kernel time of all threads of both processes, per chat. Latency runs
from the call to the prompt. `--waiting` chats are in flight at once: with 1, every chat wakes a sleeping process or
thread twice, the worst case. Measurements alternate; ratio and difference are medians over the pairs. The limit is
100 us more CPU per chat for the process.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from msgspec import Struct, to_builtins
from prometheus_client import CollectorRegistry

from benchmarks.measuring.processes import cpu_seconds
from benchmarks.measuring.results import save
from tandem.frontend.chat.chat import Chat
from tandem.frontend.chat.chat_template import TEMPLATES, ChatTemplate
from tandem.frontend.chat.render_worker import Renderer
from tandem.frontend.chat.template_sandbox import SandboxedTemplates
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.cli.bench.distribution import percentile
from tandem.frontend.metrics.frontend_metrics import TemplateMetrics
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.workers import Workers
from tandem.protocol.model_folder import TemplateSource, read_template

CHARS = 120
"""Length of each message."""
WARM_CHATS = 100
GOAL_US = 100.0


class Figures(Struct, frozen=True):
    """Figures of one side of one pair."""

    side: str
    """"process" or "thread"."""
    messages: int
    waiting: int
    chats: int
    cpu_us: float
    """CPU of both processes per chat, in microseconds."""
    worker_us: float
    """CPU of the rendering process; 0 for the thread."""
    p50_us: float
    p99_us: float
    """Microseconds from the call to the prompt."""


class Comparison(Struct, frozen=True):
    """Medians over the pairs of a load."""

    messages: int
    waiting: int
    process_us: float
    thread_us: float
    difference_us: float
    ratio: float


def conversation(messages: int) -> Conversation:
    """Make a conversation of `messages` messages, the first from the system."""
    text = ("Which function of the standard library joins two paths, and since when? " * 2)[:CHARS]
    roles = ["system", *("user", "assistant") * (messages // 2)][:messages]
    return Conversation([{"role": role, "content": f"{number} {text}"} for number, role in enumerate(roles)])


class ThreadSide:
    """Renderer in a thread of this process."""

    name = "thread"
    worker: int | None = None

    def __init__(self, template: ChatTemplate, workers: Workers) -> None:
        self._template = template
        self._workers = workers
        self._renderer = Renderer(template.templates, SandboxedTemplates())
        self._renderer.compile_all()

    async def render(self, conversation: Conversation) -> str:
        return await self._workers.run(self._render, conversation)

    def _render(self, conversation: Conversation) -> str:
        request = self._template.request(conversation, IgnoredFields())
        rendered = self._renderer.render(request.template, request.variables)
        return self._template.prompt(conversation, rendered)


class ProcessSide:
    """Renderer in the frontend's template process."""

    name = "process"

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @property
    def worker(self) -> int | None:
        """PID of the rendering process."""
        return self._chat.renderer_pid

    async def render(self, conversation: Conversation) -> str:
        return await self._chat.render(conversation, IgnoredFields())


async def measure(side: ThreadSide | ProcessSide, messages: int, waiting: int, chats: int) -> Figures:
    """Render chats, `waiting` concurrently."""
    asked = conversation(messages)
    await _render(side.render, asked, waiting, WARM_CHATS)
    worker = (lambda: 0.0) if side.worker is None else lambda: cpu_seconds(cast(int, side.worker))
    own, apart = time.process_time(), worker()
    seconds = sorted(await _render(side.render, asked, waiting, chats))
    own, apart = time.process_time() - own, worker() - apart
    done = len(seconds)
    return Figures(
        side.name,
        messages,
        waiting,
        done,
        cpu_us=round((own + apart) / done * 1e6, 1),
        worker_us=round(apart / done * 1e6, 1),
        p50_us=round(percentile(seconds, 50) * 1e6, 1),
        p99_us=round(percentile(seconds, 99) * 1e6, 1),
    )


async def _render(
    render: Callable[[Conversation], Awaitable[str]], asked: Conversation, waiting: int, chats: int
) -> list[float]:
    """Render a conversation repeatedly; return the seconds of each."""
    seconds: list[float] = []

    async def one_after_another() -> None:
        for _ in range(max(chats // waiting, 1)):
            begun = time.monotonic()
            await render(asked)
            seconds.append(time.monotonic() - begun)

    await asyncio.gather(*(one_after_another() for _ in range(waiting)))
    return seconds


def compared(figures: list[Figures]) -> Comparison:
    """Return the medians of a load's pairs."""
    pairs = list(zip(figures[::2], figures[1::2], strict=True))
    return Comparison(
        figures[0].messages,
        figures[0].waiting,
        process_us=statistics.median([process.cpu_us for process, _ in pairs]),
        thread_us=statistics.median([thread.cpu_us for _, thread in pairs]),
        difference_us=round(statistics.median([process.cpu_us - thread.cpu_us for process, thread in pairs]), 1),
        ratio=round(statistics.median([process.cpu_us / thread.cpu_us for process, thread in pairs]), 3),
    )


async def run(arguments: argparse.Namespace) -> tuple[list[Figures], list[Comparison]]:
    """Measure and print everything."""
    name = arguments.template
    source = TemplateSource({"default": read_template(TEMPLATES / f"{name}.jinja")}, f"built in: {name}")
    template = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})
    workers = Workers(1, "render")
    chat = Chat(template, FORMATS["json"], "auto", None, cast(Any, None), workers, TemplateMetrics(CollectorRegistry()))
    process, thread = ProcessSide(chat), ThreadSide(template, workers)
    figures: list[Figures] = []
    comparisons: list[Comparison] = []
    try:
        asked = conversation(min(arguments.messages))
        assert await process.render(asked) == await thread.render(asked)
        for messages in arguments.messages:
            chats = max(arguments.chats * 4 // messages, 20)
            for waiting in arguments.waiting:
                found: list[Figures] = []
                for _ in range(arguments.pairs):
                    for side in (process, thread):
                        found.append(await measure(side, messages, waiting, chats))
                        print(_line(found[-1]), flush=True)
                figures += found
                comparisons.append(compared(found))
    finally:
        await chat.close()
        workers.close()
    return figures, comparisons


def _line(f: Figures) -> str:
    return (
        f"{f.side:8} {f.messages:5} messages, {f.waiting:2} at once: {f.cpu_us:7.1f} us of CPU "
        f"({f.worker_us:.1f} in the process that renders), p50 {f.p50_us:.0f} us, p99 {f.p99_us:.0f} us"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, nargs="+", default=[4, 32, 256], help="messages of a conversation")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 8], help="chats under way at once")
    parser.add_argument("--chats", type=int, default=1000, help="chats of 4 messages a measurement, fewer of longer")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each side")
    parser.add_argument("--template", default="qwen3", help="a built-in template (default: qwen3)")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    figures, comparisons = asyncio.run(run(arguments))
    for c in comparisons:
        print(
            f"{c.messages} messages, {c.waiting} at once: process {c.process_us:.1f} us, thread {c.thread_us:.1f} us, "
            f"{c.difference_us:+.1f} us (goal: at most +{GOAL_US:.0f}), ratio {c.ratio:.3f}"
        )
    if arguments.save:
        config = {name: value for name, value in vars(arguments).items() if name != "save"}
        config |= {"chars": CHARS, "cores": os.cpu_count()}
        print(save(arguments.save, config, {"compared": to_builtins(comparisons), "measured": to_builtins(figures)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
