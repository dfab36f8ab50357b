"""Client of the process that renders chat templates.

There is one process per frontend. It is killed and replaced if a conversation takes too long.
"""

import asyncio
import contextlib
import logging
import socket
import sys

from tandem.frontend.chat.render_connection import RenderConnection
from tandem.frontend.chat.render_frames import MEMORY_BYTES, OUT_OF_MEMORY, PROMPT, READY
from tandem.frontend.chat.render_queue import RenderJob, RenderQueue
from tandem.frontend.chat.template_sandbox import MAX_SECONDS, TOOK_TOO_LONG, RenderError
from tandem.frontend.errors import ApiError
from tandem.frontend.metrics.frontend_metrics import TemplateMetrics
from tandem.frontend.process import ManagedProcess, bare_environment

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Seconds between two checks of the process. Only time in which the frontend itself runs counts."""
MAX_TICKS = round((MAX_SECONDS + 1.0) / TICK_SECONDS)
"""Maximum ticks of a conversation: the sandbox stops a template earlier where possible."""
MAX_START_TICKS = round(60.0 / TICK_SECONDS)
MAX_FAILED_STARTS = 2
"""Consecutive failed starts after which waiting conversations fail."""
MAX_RETRIES = 1
"""Number of retries of a conversation after its process was killed externally, or exited without a reason."""
_EXIT_SECONDS = 1.0
"""Seconds for a process that has closed its socket to exit, so that its own exit status is reported."""
_ARGV = (sys.executable, "-P", "-m", "tandem.frontend.chat.render_worker")
_LINE_BYTES = 2**16
"""Maximum length of a line of the process's stderr in the log."""
_CRASH_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
"""Signals caused by the process itself; others are external."""


class TemplateProcess:
    """Process that renders the chat templates of a frontend (`render_worker`).

    It runs from `start` or the first conversation on. templates: frame with the model's templates.
    """

    def __init__(self, templates: bytes, metrics: TemplateMetrics, tick_seconds: float = TICK_SECONDS) -> None:
        self._templates = templates
        self._metrics = metrics
        self._tick_seconds = tick_seconds
        self._queue = RenderQueue()
        self._process: ManagedProcess | None = None
        self._connection: RenderConnection | None = None
        """Connection to the process once it is ready."""
        self._lives: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        """Ticks since the start of the process or of its current conversation."""
        self._was_too_slow = False
        self._num_answers = 0
        """Number of replies of the current process."""
        self._num_failed_starts = 0
        """Number of consecutive processes that exited before they were ready."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None before its start and while it is replaced."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in the background unless it runs."""
        if not self._is_closed and (self._lives is None or self._lives.done()):
            self._lives = asyncio.get_running_loop().create_task(self._live())

    async def render(self, request: bytes, client: str = "") -> str:
        """Render a conversation, given the frame of its request.

        client: name of the API key, which has a share of the process.

        Raises RenderError if the template fails or was stopped; ApiError 500 if the process cannot be started, or if
        two processes in a row were killed while rendering this conversation.
        """
        job = RenderJob(request, asyncio.get_running_loop().create_future(), client)
        self._queue.add(job)
        if self._connection is None:
            self.start()
        else:
            self._give()
        return await job.prompt

    async def close(self) -> None:
        """Kill the process and wait for its exit; cancel pending conversations."""
        self._is_closed = True
        for job in self._queue.take_all():
            job.prompt.cancel()
        if self._process is not None:
            self._process.kill()
        if self._lives is not None:
            await self._lives
        if self._timer is not None:
            self._timer.cancel()

    async def _live(self) -> None:
        """Run a process, and successors as long as needed."""
        while not self._is_closed and await self._live_once():
            logger.warning("the process that renders chat templates is started again")

    async def _live_once(self) -> bool:
        """Run a process until it exits; return True if it needs a successor."""
        self._ticks = self._num_answers = 0
        self._was_too_slow = False
        self._watch()
        connection = RenderConnection(self._received)
        try:
            status = await self._run(connection)
        except OSError as error:
            status = f"cannot be started: {error.strerror or error}"
        was_ready, self._connection = self._connection is not None, None
        guilty = self._queue.take_back()
        if self._is_closed:
            return False
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        if 0 < self._num_failed_starts < MAX_FAILED_STARTS:
            logger.warning("the process that renders chat templates %s before it was ready", status)
            return True
        if not was_ready:
            # A successor would fail too; the next conversation tries again.
            self._num_failed_starts = 0
            for job in self._queue.take_all():
                _fail(job, _ended(status))
            logger.error("the process that renders chat templates %s before it was ready", status)
            return False
        self._metrics.restarts.labels("time" if self._was_too_slow else "ended").inc()
        if guilty is None:
            logger.error("the process that renders chat templates %s", status)
        else:
            if self._was_too_slow:
                logger.warning("a conversation took more than %g s to render; its process was killed", self._limit)
                _fail(guilty, RenderError(f"{TOOK_TOO_LONG} (at most {MAX_SECONDS:g} s)"))
            else:
                logger.error("the process that renders chat templates %s while it rendered a conversation", status)
                self._fail_or_retry(guilty, _ended_with(status))
        return len(self._queue) > 0 or guilty is not None or self._num_answers > 0

    def _fail_or_retry(self, job: RenderJob, error: RenderError | ApiError) -> None:
        """Fail a conversation after its process exited, or render it again.

        It is rendered again once if the exit may have had another cause.
        """
        job.num_deaths += 1
        if isinstance(error, RenderError) or job.num_deaths > MAX_RETRIES:
            _fail(job, error)
        else:
            self._queue.retry(job)

    async def _run(self, connection: RenderConnection) -> str:
        """Run a process until it exits; return how it exited.

        Raises OSError if it cannot be started.

        """
        ours, theirs = socket.socketpair()
        argv = [*_ARGV, str(theirs.fileno())]
        fds = [theirs.fileno()]
        process = ManagedProcess(
            "template renderer", argv, pass_fds=fds, environment=bare_environment(), pipe_limit=_LINE_BYTES
        )
        self._process = process
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                with theirs:
                    await process.start()
                undo.pop_all()
            connection.open(ours)
            connection.write(self._templates)
            await connection.lost
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await process.wait()
        finally:
            connection.close()
            process.kill()
        await process.wait()
        return f"ended with {process.exit_status}"

    @property
    def _limit(self) -> float:
        return MAX_TICKS * self._tick_seconds

    def _give(self) -> None:
        assert self._connection is not None, "the process is ready"
        requests = self._queue.next_frames()
        if requests:
            self._connection.write(requests[0] if len(requests) == 1 else b"".join(requests))
            self._watch()

    def _received(self, connection: RenderConnection, kind: int, text: bytes) -> None:
        """Handle a frame of the process."""
        self._ticks = 0
        if kind == READY:
            self._connection = connection
        else:
            self._num_answers += 1
            prompt = self._queue.finish().prompt
            if not prompt.done():
                if kind == PROMPT:
                    prompt.set_result(text.decode())
                else:
                    prompt.set_exception(RenderError(text.decode()))
        self._give()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        """Kill the process if it takes too long.

        Stop ticking when idle.
        """
        self._timer = None
        is_starting = self._connection is None
        if self._process is None or not (is_starting or self._queue.current):
            return
        self._ticks += 1
        if self._ticks > (MAX_START_TICKS if is_starting else MAX_TICKS):
            self._was_too_slow = True
            self._process.kill()
        else:
            self._watch()


def _fail(job: RenderJob, error: Exception) -> None:
    if not job.prompt.done():
        job.prompt.set_exception(error)


def _ended_with(status: str) -> RenderError | ApiError:
    """Return the error of a conversation after its process exited while rendering it."""
    if status == f"ended with exit code {OUT_OF_MEMORY}":
        return RenderError(f"it ran out of memory (at most {MEMORY_BYTES // 2**20} MiB)")
    if status.removeprefix("ended with signal ") in _CRASH_SIGNALS:
        return RenderError(f"its process {status}: it recurses too deeply or takes too much memory")
    return _ended(status)


def _ended(status: str) -> ApiError:
    message = f"the process that renders chat templates {status}; try again, and see the server's log if it persists"
    return ApiError(500, message, None, "template_process_failed")
