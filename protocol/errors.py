"""Error codes, finish reasons and exit codes.

Frontends and the engine core share them.
"""

from enum import IntEnum, StrEnum


class ErrorCode(StrEnum):
    """Reason why a request failed.

    `frontend/errors.py` maps each code to one HTTP status.
    """

    INVALID_REQUEST = "invalid_request"
    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH = "context_length_exceeded"
    KV_CAPACITY = "kv_capacity_exceeded"
    INVALID_GRAMMAR = "invalid_grammar"
    GRAMMAR_FAILED = "grammar_failed"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    SESSION_BUSY = "session_busy"
    SESSIONS_OFF = "sessions_off"
    SHUTTING_DOWN = "shutting_down"
    ENGINE_PAUSED = "engine_paused"
    ENGINE_SLEEPING = "engine_sleeping"
    WEIGHTS_CHANGED = "weights_changed"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_FAILED = "engine_failed"
    MODEL_FAILED = "model_failed"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_FAILED = "adapter_failed"


class FinishReason(StrEnum):
    """Reason why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ProtocolError(Exception):
    """A message cannot be decoded, or breaks a rule that its types cannot express."""


class ExitCode(IntEnum):
    """Exit code of an engine core process.

    The supervisor stops after CONFIG, and after three failed starts in a row; otherwise it restarts the engine.
    """

    OK = 0
    CONFIG = 2
    FATAL = 70
    BUSY = 75
    """Another process holds the memory of the device."""
