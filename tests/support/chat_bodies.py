"""Bodies of chats for tests of their parsing."""

from typing import Any

import jsonschema
import msgspec

from tandem.frontend.api.chat_completions.request import BODY, ChatRequest, parse_chat
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.support.refusals import refusal

USER = {"role": "user", "content": "hi"}
BASE = {"model": "m", "messages": [USER]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
ADD = {"type": "function", "function": {"name": "add"}}
VALIDATOR = jsonschema.Draft202012Validator(BODY.schema())


def parse(**fields: Any) -> ChatRequest:
    """Parse a body of a server that refuses unknown fields."""
    return parse_chat(msgspec.json.encode({**BASE, **fields}), 1024, IgnoredFields(refuse=True))


def refused(**fields: Any) -> ApiError:
    return refusal(parse, **fields)


def tolerant(**fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    """Parse a body of a server that ignores unknown fields; return the names of those too."""
    ignored = IgnoredFields()
    return parse_chat(msgspec.json.encode({**BASE, **fields}), 1024, ignored), ignored.paths


def described(**fields: Any) -> bool:
    """Return true if the schema accepts this body."""
    return bool(VALIDATOR.is_valid({**BASE, **fields}))
