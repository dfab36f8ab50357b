"""Errors that parsers and checks raise for invalid requests."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.frontend.errors import ApiError

_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?!\w|\.\d)")


def refusal(parse: Callable[..., object], **fields: Any) -> ApiError:
    """Return the error that a parser raises for these fields."""
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


@contextmanager
def raises_api_error(status: int, code: str | None = None, param: str | None = None) -> Iterator[None]:
    """Check that the block raises an ApiError with this status and, if given, this code and field."""
    with pytest.raises(ApiError) as caught:
        yield
    error = caught.value
    assert error.status == status, error
    assert code is None or error.code == code, (error.code, error)
    assert param is None or error.param == param, (error.param, error)


def numbers_in(message: str) -> list[float]:
    """Return the numbers in a message, in order; digits within words such as `tool2` do not count."""
    return [float(number) for number in _NUMBER.findall(message)]


def check_taken_or_refused_by_name(parse: Callable[..., object], fields: dict[str, Any]) -> None:
    """Check that a parser accepts the fields, or raises 400 with the name of one."""
    error: ApiError | None = None
    try:
        parse(**fields)
    except ApiError as caught:
        error = caught
    assert error is None or (error.status == 400 and error.param is not None)
