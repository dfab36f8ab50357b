"""Steps that take a millisecond each, so that what an engine plans does not depend on the speed of the machine."""

from collections.abc import Callable

from tandem.engine_core.startup.device import DeviceParts


class TickingEvent:
    """Event with timing; any two are a millisecond apart."""

    def record(self) -> None:
        return None

    def elapsed_time(self, other: "TickingEvent") -> float:
        return 1.0


def ticking(new_parts: Callable[[str], DeviceParts]) -> Callable[[str], DeviceParts]:
    """Return a function that opens the same device, on which steps of a CPU take a millisecond."""

    def open_ticking(kind: str) -> DeviceParts:
        parts = new_parts(kind)
        if kind == "cpu":
            parts.device.instant = TickingEvent  # type: ignore[method-assign]
        return parts

    return open_ticking
