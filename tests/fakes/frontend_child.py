"""Child of a slot that exists only in the test, which plays its messages and its end."""

from collections.abc import Callable

from tandem.frontend.control_channel import Accept, Beat, Drain, FromFrontend, Leaving, ToFrontend


class FakeFrontendChild:
    """Records what it is sent; `says` and `ends` call the slot back. The child obeys if it says so itself."""

    def __init__(
        self, slot: int, pid: int, on_message: Callable[[FromFrontend], None], on_exit: Callable[[int], None]
    ) -> None:
        self.slot = slot
        self._pid: int | None = pid
        self.sent: list[ToFrontend] = []
        self.is_killed = False
        self._on_message = on_message
        self._on_exit = on_exit

    @property
    def pid(self) -> int | None:
        return self._pid

    def send(self, message: ToFrontend) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.is_killed = True

    @property
    def is_running(self) -> bool:
        return self.pid is not None

    @property
    def accepts(self) -> tuple[int, ...]:
        """The slots of the last order, its own before any."""
        orders = [message.slots for message in self.sent if isinstance(message, Accept)]
        return orders[-1] if orders else (self.slot,)

    @property
    def drains(self) -> list[Drain]:
        return [message for message in self.sent if isinstance(message, Drain)]

    def beats(self, status: str = "serving") -> None:
        self._on_message(Beat(status, self.accepts if status == "serving" else ()))

    def says(self, message: FromFrontend) -> None:
        self._on_message(message)

    def leaves(self) -> None:
        self._on_message(Leaving())

    def ends(self, code: int = 0) -> None:
        self._pid = None
        self._on_exit(code)


class FakeFrontendChildren:
    """Starts fake children and keeps them in the order of their start."""

    def __init__(self) -> None:
        self.started: list[FakeFrontendChild] = []

    def __call__(
        self, slot: int, on_message: Callable[[FromFrontend], None], on_exit: Callable[[int], None]
    ) -> FakeFrontendChild:
        self.started.append(FakeFrontendChild(slot, 100 + len(self.started), on_message, on_exit))
        return self.started[-1]

    @property
    def running(self) -> list[FakeFrontendChild]:
        return [child for child in self.started if child.is_running]

    def states(self) -> list[tuple[int, int | None, bool, list[ToFrontend]]]:
        """Return the slot, the pid, if it was killed and what it was sent of each child that was started."""
        return [(child.slot, child.pid, child.is_killed, child.sent) for child in self.started]

    def of(self, slot: int) -> FakeFrontendChild:
        """Return the newest child of a slot."""
        return [child for child in self.started if child.slot == slot][-1]
