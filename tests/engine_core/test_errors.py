"""Errors carry what their reader needs, as values."""

import pytest

from tandem.engine_core.errors import ConfigError, EngineError, FatalError, RequestError
from tandem.protocol.errors import ErrorCode


def test_request_error_carries_code_and_message() -> None:
    error = RequestError(ErrorCode.KV_CAPACITY, "too long")
    assert (error.code, error.message, str(error)) == (ErrorCode.KV_CAPACITY, "too long", "too long")


@pytest.mark.parametrize("kind", [ConfigError, FatalError, RequestError])
def test_every_error_is_an_engine_error(kind: type[Exception]) -> None:
    assert issubclass(kind, EngineError)
    assert not issubclass(kind, ValueError)
