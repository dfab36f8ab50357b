"""What can go wrong between the two kinds of process, as values rather than as text."""

from enum import IntEnum, StrEnum


class ErrorCode(StrEnum):
    """Why a request ended in an error. `frontend/errors.py` maps each code to one HTTP status."""

    INVALID_REQUEST = "invalid_request"
    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH = "context_length_exceeded"
    KV_CAPACITY = "kv_capacity_exceeded"
    INVALID_GRAMMAR = "invalid_grammar"
    GRAMMAR_FAILED = "grammar_failed"
    OVERLOADED = "overloaded"
    SESSION_BUSY = "session_busy"
    SESSIONS_OFF = "sessions_off"
    SHUTTING_DOWN = "shutting_down"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_FAILED = "engine_failed"


class FinishReason(StrEnum):
    """How a request that did not fail ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ProtocolError(Exception):
    """A message that cannot be decoded, or that breaks a rule that its types cannot express."""


class ExitCode(IntEnum):
    """How an engine core process ends; the supervisor restarts it after FATAL alone and reports CONFIG."""

    OK = 0
    CONFIG = 2
    FATAL = 70
