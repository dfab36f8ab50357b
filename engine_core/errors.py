"""Errors of the engine core.

A `RequestError` ends one request and a `ConfigError` the start. A `FatalError` ends the engine core, once every open
request has got its terminal event.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protocol.errors import ErrorCode


class EngineError(Exception):
    """Base class of errors that the engine core raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start with these options; each message names the change that is needed."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Begin each problem of a ConfigError with the setting that it is about."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(*[f"{setting}: {problem}" for problem in error.problems]) from None


class ConfigProblems:
    """Collects the errors of several option checks.

    A user so learns of all of it at once.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Note a ConfigError instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self._found += error.problems

    def check(self) -> None:
        """Raise ConfigError if anything was refused."""
        if self._found:
            raise ConfigError(*dict.fromkeys(self._found))


class MemoryTooSmallError(ConfigError):
    """The memory does not hold the engine that was asked for."""


class DeviceBusyError(EngineError):
    """Another process holds memory without which the engine cannot start.

    A later start may succeed.
    """


class RequestError(EngineError):
    """One request cannot be served; its client gets the code and the message."""

    def __init__(self, code: ErrorCode, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after
        """Seconds after which the same request may succeed; 0 if they are unknown."""


class DeviceMemoryError(EngineError):
    """A step needs more device memory than is free.

    The device is sound, and the step has left no trace.
    """


class WeightsError(EngineError):
    """The weights could not be replaced."""

    def __init__(self, message: str, *, is_intact: bool) -> None:
        """is_intact: True if the weights are those before the attempt; False if some of them may be others."""
        super().__init__(message)
        self.is_intact = is_intact


class SleepError(EngineError):
    """Memory could not be released or restored; what sleeps is what slept before."""

    def __init__(self, message: str, *, is_lack: bool = False) -> None:
        """is_lack: True if memory is missing, so that the same call may succeed later."""
        super().__init__(message)
        self.is_lack = is_lack


class FatalError(EngineError):
    """The state of the device is unknown; the process must be replaced.

    A launch failed, or CUDA reported an error.
    """
