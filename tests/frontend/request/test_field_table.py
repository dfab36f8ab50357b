"""The published table of request fields, and that it is true of the parsers."""

from typing import Any

import msgspec
import pytest

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.api.messages.request import parse_message_request
from tandem.frontend.api.responses.request import parse_responses
from tandem.frontend.errors import ApiError
from tandem.frontend.request.extra_fields import IGNORED_PATHS, OTHER, ignored_label
from tandem.frontend.request.field_types import Ignored, Unsupported
from tandem.frontend.request.fields import Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.support.field_tables import BODIES, PAGE, render, rows

HELLO = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
BASES: dict[str, dict[str, Any]] = {
    "completions": {"model": "m", "prompt": "p"},
    "chat": {"model": "m", "messages": [HELLO]},
    "responses": {"model": "m", "input": "p"},
    "messages": {"model": "m", "messages": [HELLO], "max_tokens": 5},
}


def parse(endpoint: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """Parse a body of an endpoint; return what it ignores."""
    ignored, body = IgnoredFields(), msgspec.json.encode({**BASES[endpoint], **fields})
    match endpoint:
        case "completions":
            parse_completion(body, ignored)
        case "chat":
            parse_chat(body, 16, ignored)
        case "responses":
            parse_responses(body, 16, ignored)
        case _:
            parse_message_request(body, ignored)
    return ignored.paths


def unserved(kind: type) -> list[Any]:
    return [
        pytest.param(endpoint, field, id=f"{endpoint} {field.name}")
        for endpoint, body in BODIES.items()
        for field in {field.name: field for field in body.fields}.values()
        if isinstance(field.type, kind)
    ]


def test_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.support.field_tables"


def test_every_field_has_a_meaning_or_a_reason() -> None:
    assert [row for row in rows() if not row[3]] == []


@pytest.mark.parametrize(("endpoint", "field"), unserved(Ignored))
def test_ignored_field_is_named_and_counted_by_its_name(endpoint: str, field: Field) -> None:
    assert parse(endpoint, {field.name: {"any": "value"}}) == (field.name,)
    assert ignored_label(field.name) != OTHER
    assert isinstance(field.type, Ignored)
    for value in (None, *field.type.accepted):
        assert parse(endpoint, {field.name: value}) == ()


@pytest.mark.parametrize(("endpoint", "field"), unserved(Unsupported))
def test_refused_field_is_refused_by_its_name(endpoint: str, field: Field) -> None:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, {field.name: {"any": "value"}})
    assert (caught.value.status, caught.value.param) == (400, field.name)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.message.endswith(f"is accepted. {field.text}".rstrip(".")), "the text says what to use instead"
    assert isinstance(field.type, Unsupported)
    for value in (None, *field.type.accepted):
        assert parse(endpoint, {field.name: value}) == ()


@pytest.mark.parametrize("path", [path for path, _ in IGNORED_PATHS])
def test_known_name_within_a_chat_is_ignored(path: str) -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [{**CALL}]}
    body: dict[str, Any] = {"messages": [message], "tools": [{"type": "function", "function": {"name": "look"}}]}
    *way, name = path.split(".")
    place: Any = body
    for step in way:
        place = place[step.removesuffix("[]")]
        place = place[0] if step.endswith("[]") else place
    place[name] = [{"any": "value"}]
    assert parse("chat", body) == (path,)
    assert ignored_label(path) == path
