"""What the parsers of requests make of bodies that are not right."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.frontend.errors import ApiError


def refusal(parse: Callable[..., object], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


def check_taken_or_refused_by_name(parse: Callable[..., object], fields: dict[str, Any]) -> None:
    error: ApiError | None = None
    try:
        parse(**fields)
    except ApiError as caught:
        error = caught
    assert error is None or (error.status in (400, 422) and error.param is not None)
