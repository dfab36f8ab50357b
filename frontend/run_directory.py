"""Private directories of running processes, with cleanup after killed ones."""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_NAME = "lock"
"""File that the owner of a directory keeps locked while it runs."""
MAX_PARENT_BYTES = 50
"""Maximum length of the temporary directory's path that leaves room for the name of a socket."""
_PREFIX = "tandem-"

logger = logging.getLogger(__name__)


@contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a new directory with mode 0700 for sockets and state, removed at exit.

    Directories left behind by killed processes of this user are removed first.
    """
    temporary = tempfile.gettempdir()
    parent = Path(temporary if len(os.fsencode(temporary)) < MAX_PARENT_BYTES else "/tmp")
    remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _lock_new(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale(parent: Path) -> None:
    """Remove this user's abandoned run directories in `parent`.

    The kernel releases a lock when its process exits for any reason. Directories without a lock file are left alone.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            logger.debug("removed %s, which a process that was killed had left behind", folder)


def _lock_new(folder: Path) -> int:
    """Create the lock file of a new directory and return its descriptor.

    It is renamed once locked, so that a file with the final name is never unlocked while its owner runs.
    """
    unnamed = folder / f"{LOCK_NAME}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # If the file system has no locks, the directory has no lock file and is never considered abandoned.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / LOCK_NAME)
    return lock


@contextmanager
def _abandoned(folder: Path) -> Iterator[None]:
    """Hold the lock of an abandoned directory.

    Raises OSError if the directory belongs to another user, is a link, has no lock file, or has an owner.

    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(f"the lock of {folder} is not a file")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
