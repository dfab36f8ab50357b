"""Read and write the files of a batch.

The format is OpenAI's JSONL, with one request or result per line.
"""

import codecs
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct

from tandem.protocol.text_files import without_bom

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MAX_ID_CHARS = 512


MAX_REPORTED = 20
"""Maximum number of invalid lines in an error message."""
RETRIED = frozenset({409, 429, *range(500, 600)})
"""Statuses of a busy or failed server or session, which do not depend on the request itself."""


class BatchError(Exception):
    """Batch files that cannot be used.

    The message has the file and a line for each invalid line.
    """


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Line of the input. The body is sent to the server byte for byte."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    stream: bool | None = None


def read_requests(path: Path) -> list[BatchRequest]:
    """Read all requests of a file in order, skipping blank lines and byte order marks.

    Raises BatchError that lists the invalid lines.
    """
    requests: list[BatchRequest] = []
    bad: list[str] = []
    lines: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, path), 1):
                if not line.strip():
                    continue
                try:
                    request = _parse(line, f"{path}:{number}")
                except BatchError as error:
                    bad.append(str(error))
                    continue
                if (first := lines.setdefault(request.custom_id, number)) != number:
                    bad.append(f"{path}:{number}: custom_id {request.custom_id!r} is already used in line {first}")
                requests.append(request)
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}") from None
    if bad:
        raise BatchError(_list_lines(bad, path))
    return requests


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without byte order marks, which each of several concatenated files may have.

    Raises BatchError for UTF-16 and UTF-32.

    """
    try:
        yield without_bom(file.readline())
    except ValueError as error:
        raise BatchError(f"{path} cannot be read: {error}") from None
    for line in file:
        yield line.removeprefix(codecs.BOM_UTF8)


def _list_lines(bad: list[str], path: Path) -> str:
    more = f"\n{path}: {len(bad) - MAX_REPORTED} more lines are invalid" if len(bad) > MAX_REPORTED else ""
    total = f"\n{path}: {len(bad)} lines are invalid; nothing was sent" if len(bad) > 1 and not more else more
    return "\n".join(bad[:MAX_REPORTED]) + total


def _parse(line: bytes, location: str) -> BatchRequest:
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BatchError(f"{location}: {error}") from None
    if not 1 <= len(request.custom_id) <= MAX_ID_CHARS:
        raise BatchError(
            f"{location}: custom_id must have 1 to {MAX_ID_CHARS} characters, not {len(request.custom_id)}"
        )
    if request.method != "POST":
        raise BatchError(f"{location}: method must be POST, not {request.method!r}")
    if request.url not in URLS:
        raise BatchError(f"{location}: url must be one of {', '.join(URLS)}, not {request.url!r}")
    if body.stream:
        raise BatchError(f"{location}: a batch does not support streaming; remove 'stream' from the body")
    # Copy, as the body would otherwise keep the whole line in memory.
    return msgspec.structs.replace(request, body=request.body.copy())


class BatchResponse(Struct, frozen=True):
    """The server's response, whatever its status."""

    status_code: int
    request_id: str
    body: Raw


class BatchFailure(Struct, frozen=True):
    """The reason why a request has no response."""

    code: str
    message: str


class BatchResult(Struct, frozen=True):
    """Line of the output; either `response` or `error` is null."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchFailure | None

    @property
    def succeeded(self) -> bool:
        """Return True for a response with status 200."""
        return self.response is not None and self.response.status_code == 200

    @property
    def is_final(self) -> bool:
        """Return True if the request is done.

        It is not after a failure that does not depend on the request itself.
        """
        return self.response is None or self.response.status_code not in RETRIED


def result(custom_id: str, outcome: BatchResponse | BatchFailure) -> BatchResult:
    """Create the result of a request, with a new id."""
    response = outcome if isinstance(outcome, BatchResponse) else None
    failure = outcome if isinstance(outcome, BatchFailure) else None
    return BatchResult(f"batch_req_{secrets.token_hex(12)}", custom_id, response, failure)


class BatchOutput:
    """Output file that only this process writes to.

    Each result is one write that ends with a newline.

    """

    def __init__(self, file: BinaryIO, done: dict[str, bool]) -> None:
        self.done = done
        """Each custom_id that has a result, and True if it succeeded."""
        self._file = file

    def add(self, outcome: BatchResult) -> None:
        """Append a result to the file.

        Raises BatchError if it cannot be written, for example because the disk is full.
        """
        assert outcome.custom_id not in self.done, f"{outcome.custom_id!r} has a result already"
        start = os.fstat(self._file.fileno()).st_size
        rest = memoryview(msgspec.json.encode(outcome) + b"\n")
        try:
            while rest:  # unbuffered, as a buffer would retry its unwritten part when closed
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            with suppress(OSError):  # A partial result would make later ones unreadable.
                os.ftruncate(self._file.fileno(), start)
            raise BatchError(
                f"{self._file.name} cannot be written: {error.strerror}; fix that and run the same command again"
            ) from None
        self.done[outcome.custom_id] = outcome.succeeded


@contextmanager
def open_output(path: Path) -> Iterator[BatchOutput]:
    """Open or create an output file, truncating an incomplete last line.

    Raises BatchError for a file that cannot be written, is locked by another run, or has other content.
    """
    if path.exists() and not path.is_file():
        raise BatchError(f"{path} is not a regular file; results are read again where a run is resumed")
    try:
        # In append mode the operating system writes at the end of the file.
        file = path.open("a+b")
    except OSError as error:
        raise BatchError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"another run is writing to {path}; wait for it or choose another output") from None
        yield BatchOutput(file, _recover(file, path))


def _recover(file: BinaryIO, path: Path) -> dict[str, bool]:
    """Read the results in an output file and truncate an incomplete last line.

    Raises BatchError for other content.
    """
    done: dict[str, bool] = {}
    end = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            earlier = msgspec.json.decode(without_bom(line), type=BatchResult)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BatchError(f"{path}:{number} is not a batch result ({error}); choose another output") from None
        if earlier.custom_id in done:
            raise BatchError(f"{path}:{number}: custom_id {earlier.custom_id!r} has an earlier result in this file")
        done[earlier.custom_id] = earlier.succeeded
    os.ftruncate(file.fileno(), end)
    return done
