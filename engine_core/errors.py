"""Errors of the engine core, by what they end.

A `RequestError` ends one request, a `ConfigError` a start, a `FatalError` the engine core, after every open request got
its terminal event.
"""

from tandem.protocol.errors import ErrorCode


class EngineError(Exception):
    """Base class of errors that the engine core raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start with these options; the message says what to change."""


class RequestError(EngineError):
    """One request cannot be served; its client gets the code and the message."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FatalError(EngineError):
    """The state of the device is unknown; the process must be replaced.

    A launch failed, or CUDA reported an error.
    """
