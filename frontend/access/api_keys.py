"""API keys of a server, which can be reloaded while it runs."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from tandem.frontend.access.api_key import ApiKey, KeyRing, unnamed_key
from tandem.frontend.access.key_file import load_key_file
from tandem.protocol.logs import AUDIT_LOGGER, with_fields

logger = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT_LOGGER)

POLL_SECONDS = 1.0
"""Seconds between two checks for changes of the file."""
_MAX_NAMES = 32
"""Maximum number of key names in a log line."""


class ApiKeys:
    """Keys accepted by a server.

    They come from flags, the environment and a file. `ring` is replaced as a whole when the file changes. A server
    without any keys is open to everyone.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """Initialize without reading the file.

        given: secrets of keys without names.
        """
        self.file = file
        self.ring = KeyRing()
        self._given = [unnamed_key(key) for key in given]
        self._signature: object = None
        self._is_wanted = asyncio.Event()

    @property
    def is_required(self) -> bool:
        """True if requests must have a key."""
        return bool(self._given) or self.file is not None

    def load(self) -> None:
        """Load the keys at startup.

        Raises ValueError for a file that cannot be used.

        """
        self._signature = self._look()
        self.ring = KeyRing(self._read())

    def reload(self) -> bool:
        """Reload the file; return False if it is invalid.

        The current keys are kept then, and the reason is logged.
        """
        if self.file is None:
            return True
        self._signature = self._look()
        try:
            ring = KeyRing(self._read())
        except ValueError as error:
            fields = with_fields(file=str(self.file), reason=str(error))
            audit.error("API keys were not reloaded, those from before stay in force", extra=fields)
            return False
        before, self.ring = self.ring, ring
        added, removed = ring.keys.keys() - before.keys.keys(), before.keys.keys() - ring.keys.keys()
        changes = with_fields(
            file=str(self.file), keys=len(ring), added=_names(ring, added), removed=_names(before, removed)
        )
        audit.info("API keys were reloaded", extra=changes)
        return True

    def refresh(self) -> None:
        """Reload the file if it has changed."""
        if self.file is not None and self._look() != self._signature:
            self.reload()

    def reload_soon(self) -> None:
        """Make `watch` reload the file, changed or not.

        Several calls in a row cause one reload.
        """
        self._is_wanted.set()

    async def watch(self) -> None:
        """Watch the file for changes until cancelled.

        It is read in a thread: parsing many keys takes seconds, and a network file system may hang.
        """
        while self.file is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), POLL_SECONDS)
            read = self.reload if self._is_wanted.is_set() else self.refresh
            self._is_wanted.clear()
            await asyncio.to_thread(read)

    def _read(self) -> list[ApiKey]:
        named = load_key_file(self.file) if self.file is not None else []
        given = {key.digest for key in self._given}
        for number, key in enumerate(named, 1):
            if key.digest in given:
                raise ValueError(
                    f"--api-keys {self.file}: the key of [[key]] table {number} (name {key.name!r}) is also given by "
                    "--api-key, --api-key-file or TANDEM_API_KEY; remove it from there"
                )
        names = [key.name for key in self._given]
        if twins := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two API keys have digests that begin alike ({twins[0]}); replace one of them")
        return [*self._given, *named]

    def _look(self) -> object:
        """Return a value that changes when the file does."""
        if self.file is None:
            return None
        try:
            status = self.file.stat()
        except OSError as error:
            return error.errno
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid


def _names(ring: KeyRing, digests: "set[bytes]") -> list[str]:
    names = sorted(f"{ring.keys[digest].name} ({digest.hex()[:8]})" for digest in digests)
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return names[:_MAX_NAMES] + more
