"""Decoding of the values of fields, and what a large value of the wrong shape may cost."""

from typing import Any

import msgspec
import pytest

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.responses.request import parse_responses
from tandem.frontend.errors import ApiError
from tandem.frontend.request import values
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.values import MAX_EXPLAINED_BYTES

EMPTY_ARRAYS = b"[" + b"[]," * MAX_EXPLAINED_BYTES + b"[]]"


explain = values.mismatch


def explain_small(value: Any, shape: Any, path: str) -> ApiError:
    """Explain a value like `mismatch`, unless it is large."""
    assert len(msgspec.json.encode(value)) <= MAX_EXPLAINED_BYTES, "the value was built to explain it"
    return explain(value, shape, path)


@pytest.mark.parametrize("field", ["messages", "stream_options", "tools", "response_format", "logit_bias"])
def test_chat_rejects_a_large_value_without_building_it(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "mismatch", explain_small)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: msgspec.Raw(EMPTY_ARRAYS)}
    with pytest.raises(ApiError) as caught:
        parse_chat(msgspec.json.encode(body), 16, IgnoredFields())
    assert caught.value.status in (400,)


@pytest.mark.parametrize("field", ["input", "instructions", "tools", "text"])
def test_responses_reject_a_large_value_without_building_it(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "mismatch", explain_small)
    body = {"model": "m", "input": "a", field: msgspec.Raw(EMPTY_ARRAYS)}
    with pytest.raises(ApiError) as caught:
        parse_responses(msgspec.json.encode(body), 16, IgnoredFields())
    assert caught.value.status in (400,)
