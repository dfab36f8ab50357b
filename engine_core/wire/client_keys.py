"""Keys of the frontends that may connect to an engine, read from its folder."""

import logging
from pathlib import Path

from tandem.protocol.curve import load_key

logger = logging.getLogger(__name__)

ENGINE = "the engine's own key"
"""Name under which a process with the engine's keys connects, as its supervisor does."""


class ClientKeys:
    """Public keys by which frontends are let in, with the name of each.

    `names` is replaced as a whole when the folder has changed, so any thread may read it and compare it with `is`.
    """

    def __init__(self, folder: Path, own: bytes) -> None:
        """Read nothing yet.

        folder: one file `*.key` for each frontend; own: the engine's public key, which is always let in.
        """
        self.folder = folder
        self.names: dict[bytes, str] = {own: ENGINE}
        self._own = own
        self._seen: object = None

    def load(self) -> None:
        """Read the folder at the start.

        Raises ValueError if it does not exist or a file in it does not contain a key.
        """
        if not self.folder.is_dir():
            raise ValueError(
                f"{self.folder} does not exist, so no frontend could connect; `tandem keys {self.folder.parent} "
                "--client NAME` makes it with the keys of a frontend, --curve-any-client accepts every frontend that "
                "has engine.key"
            )
        self._seen = self._signature()
        self.names = {self._own: ENGINE} | {load_key(path)[0]: path.stem for path in self._files()}

    def refresh(self) -> None:
        """Read the folder again if it has changed.

        A file that cannot be read is logged and lets no frontend in.
        """
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        names = {self._own: ENGINE}
        for path in self._files():
            try:
                names[load_key(path)[0]] = path.stem
            except ValueError as error:
                logger.warning("no frontend is let in by a key file: %s", error)
        before, self.names = self.names, names
        for key in before.keys() | names.keys():
            if key not in names:
                logger.info("key %s of frontend %s was removed", key.decode()[:8], before[key])
            elif key not in before:
                logger.info("key %s of frontend %s was added", key.decode()[:8], names[key])

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == ".key")
        except OSError as error:
            logger.warning("no frontend is let in: %s cannot be read: %s", self.folder, error)
            return []

    def _signature(self) -> object:
        """Return a value that differs once a file of the folder has changed."""
        try:
            found = []
            for path in self.folder.iterdir():
                status = path.stat()
                found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
            return sorted(found)
        except OSError as error:
            return str(error)
