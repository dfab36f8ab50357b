"""Errors carry what their reader needs, as values."""

import pytest

from tandem.engine_core.errors import ConfigError, EngineError, FatalError, RequestError, RowError
from tandem.protocol.errors import ErrorCode


def test_a_row_error_is_a_request_error_of_one_sequence() -> None:
    error = RowError(7, ErrorCode.ENGINE_FAILED, "cannot be staged")
    assert isinstance(error, RequestError)
    assert (error.seq_id, error.code, error.message, str(error)) == (
        7,
        ErrorCode.ENGINE_FAILED,
        "cannot be staged",
        "cannot be staged",
    )


@pytest.mark.parametrize("kind", [ConfigError, FatalError, RequestError])
def test_all_are_engine_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, EngineError)
    assert not issubclass(kind, ValueError)
