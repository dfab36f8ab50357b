"""From the body of a request to its parsed form, within the budget of bodies."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from tandem.frontend.api.body import SMALL_BODY, BodyShare, read_body
from tandem.frontend.api.service import Service

_Parsed = TypeVar("_Parsed")


async def parse_body(
    request: Request, share: BodyShare, service: Service, parse: Callable[[bytes], _Parsed]
) -> _Parsed:
    """Reads and parses; a large body in a thread, for a small one that would cost more than it saves."""
    body = await read_body(request, service.config.max_body, share)
    if len(body) <= SMALL_BODY:
        return parse(body)
    return await service.parser.run(parse, body)


def encoded(value: object) -> Response:
    """200 with this value as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")
