"""Child process of a frontend.

It inherits the supervisor's listening sockets and one end of a control channel.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from tandem.frontend.config import frontend_name
from tandem.frontend.control_channel import FromFrontend, SupervisorEnd, ToFrontend, supervisor_end
from tandem.frontend.process import ManagedProcess
from tandem.protocol.errors import ExitCode

logger = logging.getLogger(__name__)


class FrontendChild:
    """Child process and the supervisor's end of its control channel.

    command: returns the command line for a slot and the descriptor of its channel.
    """

    def __init__(
        self,
        slot: int,
        command: Callable[[int, int], Sequence[str]],
        listener_fds: Sequence[int],
        environment: Mapping[str, str],
        on_message: Callable[[FromFrontend], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._slot = slot
        self._command = command
        self._listener_fds = listener_fds
        self._environment = environment
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: ManagedProcess | None = None
        self._channel: SupervisorEnd | None = None
        self._unsent: list[ToFrontend] = []
        """Messages sent before the channel was open."""
        self._is_killed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the program in the background of the running loop."""
        self._task = asyncio.create_task(self._run())

    def send(self, message: ToFrontend) -> None:
        if self._channel is None:
            self._unsent.append(message)
        else:
            self._channel.send(message)

    def kill(self) -> None:
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    async def _run(self) -> None:
        """Run the program until it exits, and forward its messages."""
        code: int = ExitCode.FATAL
        try:
            code = await self._run_process()
        except OSError as error:
            logger.error("%s cannot be started: %s", frontend_name(self._slot), error)
        self._on_exit(code)

    async def _run_process(self) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd = theirs.fileno()
            process = ManagedProcess(
                frontend_name(self._slot),
                self._command(self._slot, fd),
                pass_fds=[*self._listener_fds, fd],
                environment=self._environment,
            )
            if self._is_killed:
                return ExitCode.OK
            self._process = process
            await process.start()
            theirs.close()
            channel = self._channel = await supervisor_end(ours)
            for message in self._unsent:
                channel.send(message)
            reading = asyncio.create_task(self._read(channel))
            try:
                code = await process.wait()
                await reading  # messages sent before its exit
            finally:
                reading.cancel()
                channel.close()
            return code

    async def _read(self, channel: SupervisorEnd) -> None:
        while (message := await channel.receive()) is not None:
            self._on_message(message)
