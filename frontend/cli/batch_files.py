"""The input of a batch: OpenAI's JSONL, one request a line, checked as a whole before anything is sent."""

from pathlib import Path

import msgspec
from msgspec import Raw, Struct

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MAX_ID_CHARS = 512


class BatchError(Exception):
    """A batch that cannot be run as it is; the text names the file and the line."""


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One line. The body goes to the server byte for byte."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    stream: bool | None = None


def read_requests(path: Path) -> list[BatchRequest]:
    """The requests in order; blank lines are skipped. Raises BatchError."""
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                request = _parse(line, f"{path}:{number}")
                if (first := lines.setdefault(request.custom_id, number)) != number:
                    raise BatchError(f"{path}:{number}: custom_id {request.custom_id!r} is that of line {first}, too")
                requests.append(request)
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}") from None
    return requests


def _parse(line: bytes, place: str) -> BatchRequest:
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BatchError(f"{place}: {error}") from None
    if not 1 <= len(request.custom_id) <= MAX_ID_CHARS:
        raise BatchError(f"{place}: custom_id must have 1 to {MAX_ID_CHARS} characters, not {len(request.custom_id)}")
    if request.method != "POST":
        raise BatchError(f"{place}: method must be POST, not {request.method!r}")
    if request.url not in URLS:
        raise BatchError(f"{place}: url must be one of {', '.join(URLS)}, not {request.url!r}")
    if body.stream:
        raise BatchError(f"{place}: a batch takes no streams; leave 'stream' out of the body")
    # A slice of the line would keep the line.
    return msgspec.structs.replace(request, body=request.body.copy())
