"""The three ways to fail. A `RequestError` ends one request; a `ConfigError` ends a start; a `FatalError` ends the
engine core, after every open request got its terminal event."""

from tandem.protocol.errors import ErrorCode


class EngineError(Exception):
    """Base of what the engine core raises on purpose."""


class ConfigError(EngineError):
    """The engine cannot start as asked; the text says what to change."""


class RequestError(EngineError):
    """One request cannot be served; its client gets the code and the text."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FatalError(EngineError):
    """Device state is unknown (a failed launch, a CUDA error): the process has to be replaced."""
