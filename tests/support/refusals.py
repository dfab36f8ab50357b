"""Errors that request parsers raise for invalid bodies."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.errors import ApiError


def refusal(parse: Callable[..., object], **fields: Any) -> ApiError:
    """Return the error that a parser raises for these fields."""
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


def check_taken_or_refused_by_name(parse: Callable[..., object], fields: dict[str, Any]) -> None:
    """Check that a parser accepts the fields, or raises 400 or 400 with the name of one."""
    error: ApiError | None = None
    try:
        parse(**fields)
    except ApiError as caught:
        error = caught
    assert error is None or (error.status in (400,) and error.param is not None)
