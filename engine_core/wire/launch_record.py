"""Requests that an engine has launched, in a file that outlives it."""

import logging
import mmap
import os
import re
import struct
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

NUM_ENTRIES = 8192
"""Requests that a file names, the latest ones. The frontends know of earlier ones from their announcements."""
NUM_FILES = 3
"""Number of earlier lives with files that are kept: a frontend may meet an engine only after the next one has begun."""

_ENTRY = struct.Struct("<16sQ")
"""Identity of the connection, padded or cut to 16 bytes, and request id."""
_NAME = re.compile(r"[0-9]{12}")
"""Names of the files: the numbers of the lives."""


class LaunchRecord:
    """Requests in the launches of one engine, and of those before it.

    An announcement over a socket can be lost with the process that sends it, for libzmq sends from a thread of its own.
    The pages of a mapped file belong to the kernel: a process that is killed right after it has written them loses
    nothing, and a write costs no system call. Each life has a file of its own in the folder, which the supervisor
    keeps from life to life. A host that fails loses the folder; then the announcements are all there is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launched: dict[bytes, list[int]] = defaultdict(list)
        self._map: mmap.mmap | None = None
        self._next = 0
        """Entry that is written next."""

    def open(self) -> None:
        """Read the files of earlier lives, and create the file of this one.

        If the file cannot be written, for example because the disk is full, nothing is recorded and a warning is
        logged.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # Files of others, such as those that a backup or an editor leaves, stay as they are.
            named = sorted(file for file in self._folder.iterdir() if _NAME.fullmatch(file.name))
            files = [file for file in named if file.is_file()]
            if others := [entry.name for entry in named if entry not in files]:
                logger.warning("%s: ignored %s, which is not a file; remove it", self._folder, ", ".join(others))
            for file in files[:-NUM_FILES]:
                file.unlink()
            for file in files[-NUM_FILES:]:
                self._read(file)
            taken = {int(file.name) for file in named}
            number = int(files[-1].name) + 1 if files else 1
            while number in taken:
                number += 1
            self._map = _create(self._folder / f"{number:012}")
        except (OSError, ValueError) as error:
            template = "requests that make engines fail may do so once more than otherwise: %s cannot be written: %s"
            logger.warning(template, self._folder, error)

    def note(self, client: bytes, request_id: int) -> None:
        """Record that a request is in the next launch."""
        if self._map is not None:
            _ENTRY.pack_into(self._map, self._next * _ENTRY.size, client, request_id)
            self._next = (self._next + 1) % NUM_ENTRIES

    def launched(self, client: bytes) -> list[int]:
        """Return the requests that earlier lives launched for a connection."""
        return self._launched.get(_key(client), [])

    def close(self) -> None:
        """Unmap the file, which stays."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _read(self, file: Path) -> None:
        data = file.read_bytes()
        for client, request_id in _ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]):
            if any(client):
                self._launched[client].append(request_id)


def _create(file: Path) -> mmap.mmap:
    """Create a file and map it.

    Its blocks are reserved: a write to a page that the disk has no room for would kill the process.
    """
    size = NUM_ENTRIES * _ENTRY.size
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        with suppress(OSError):
            file.unlink()
        raise
    finally:
        os.close(descriptor)


def _key(client: bytes) -> bytes:
    """Return an identity as an entry has it."""
    return client[:16].ljust(16, b"\0")
