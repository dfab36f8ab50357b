"""The output of a batch: OpenAI's JSONL, one result a line in the order of their ends, added to when a run resumes."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct

from tandem.frontend.cli.batch_files import BatchError


class BatchResponse(Struct, frozen=True):
    """What the server answered, whatever the status."""

    status_code: int
    request_id: str
    body: Raw


class BatchFailure(Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class BatchResult(Struct, frozen=True):
    """One line; either `response` or `error` is null."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchFailure | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200


def result(custom_id: str, outcome: BatchResponse | BatchFailure) -> BatchResult:
    """A result with an id of its own."""
    response = outcome if isinstance(outcome, BatchResponse) else None
    failure = outcome if isinstance(outcome, BatchFailure) else None
    return BatchResult(f"batch_req_{secrets.token_hex(12)}", custom_id, response, failure)


class BatchOutput:
    """An output file that this process alone writes to. Each result is one write, with its newline."""

    def __init__(self, file: BinaryIO, done: dict[str, bool]) -> None:
        self.done = done
        """Every custom_id that has a line, and whether it succeeded."""
        self._file = file

    def add(self, outcome: BatchResult) -> None:
        assert outcome.custom_id not in self.done, f"{outcome.custom_id!r} has a result already"
        self._file.write(msgspec.json.encode(outcome) + b"\n")
        self._file.flush()
        self.done[outcome.custom_id] = outcome.succeeded


@contextmanager
def open_output(path: Path) -> Iterator[BatchOutput]:
    """Opens or creates an output; what an interrupted write left of a last line is cut off. Raises BatchError."""
    try:
        # In append mode the system puts every write at the end.
        file = path.open("a+b")
    except OSError as error:
        raise BatchError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"another run writes to {path}") from None
        yield BatchOutput(file, _recover(file, path))


def _recover(file: BinaryIO, path: Path) -> dict[str, bool]:
    done: dict[str, bool] = {}
    end = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            earlier = msgspec.json.decode(line, type=BatchResult)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BatchError(f"{path}:{number} is no result of a batch ({error}); choose another output") from None
        if earlier.custom_id in done:
            raise BatchError(f"{path}:{number}: custom_id {earlier.custom_id!r} has a result above already")
        done[earlier.custom_id] = earlier.succeeded
    os.ftruncate(file.fileno(), end)
    return done
