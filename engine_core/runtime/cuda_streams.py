"""Streams of a CUDA device, and events in the one that is current."""

import torch


class CurrentStream:
    """The stream of a CUDA device that is current.

    Torch takes longer to look it up than to record an event in it.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream


class CudaEvent:
    """Implement `Event`, and `Instant` if it is timed, by a CUDA event."""

    def __init__(self, current: CurrentStream, *, timed: bool = False) -> None:
        self._current = current
        self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(self._current.stream)

    def wait(self) -> None:
        self._event.wait(self._current.stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, later: "CudaEvent") -> float:
        """Implement `Instant.elapsed_time`."""
        return float(self._event.elapsed_time(later._event))


class SideStream:
    """Context in which a stream other than the compute stream is current.

    The compute stream is, before and afterwards. Entering and leaving it looks up less than `torch.cuda.stream` does.
    """

    def __init__(self, current: CurrentStream, side: torch.cuda.Stream) -> None:
        """Keep the stream to change to.

        current: of the device, which is the compute stream now.
        """
        self._current = current
        self._compute = current.stream
        self._side = side

    def __enter__(self) -> None:
        self._change(self._side)

    def __exit__(self, *error: object) -> None:
        self._change(self._compute)

    def _change(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        self._current.stream = stream
