"""A listening Unix socket and its file.

The file exists only while a process listens: it is removed at exit, and a stale one is replaced.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.frontend.listening import BACKLOG
from tandem.frontend.supervisor.model import AddressInUseError, LaunchError

MAX_PATH_BYTES = 107
"""Maximum path length of a Unix socket on Linux, without the terminating zero byte."""
_REMEDY = "choose another --uds"


@contextmanager
def listening_unix_socket(path: Path, mode: int) -> Iterator[socket.socket]:
    """Yield a socket that listens at a path, with these file permissions.

    Raises AddressInUseError if another process listens there, and LaunchError for other failures.
    """
    path = path.absolute()
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise LaunchError(f"the path {path} has {size} bytes, a socket's at most {MAX_PATH_BYTES}; {_REMEDY}")
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _locked(path.parent):
                _remove_stale(path)
                # Set before the file exists, so that it never has wider permissions.
                os.fchmod(sock.fileno(), mode)
                sock.bind(str(path))
                path.chmod(mode)
                sock.listen(BACKLOG)
                own = path.stat()
        except OSError as error:
            hint = f"create the folder {path.parent}, or " if error.errno == errno.ENOENT else ""
            raise LaunchError(f"cannot listen on {path} ({error.strerror or error}); {hint}{_REMEDY}") from None
        try:
            yield sock
        finally:
            _remove_own(path, own)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes that create sockets in it.

    Otherwise one of two servers that find the same stale file could remove the file of the other.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressInUseError(
                f"another process holds a lock of the folder {folder}; wait for it, or {_REMEDY}"
            ) from None
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove the file of a socket on which no process listens.

    Raises LaunchError for any other file.

    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise LaunchError(f"{path} exists and is not a socket; remove it, or {_REMEDY}")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        found = probe.connect_ex(str(path))
    if found in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise AddressInUseError(f"another process listens on {path}; stop it, or {_REMEDY}")
    if found != errno.ECONNREFUSED:
        raise OSError(found, os.strerror(found))
    path.unlink()


def _remove_own(path: Path, own: os.stat_result) -> None:
    """Remove the file unless another socket has replaced it."""
    with suppress(OSError, LaunchError), _locked(path.parent):
        found = path.lstat()
        if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
            path.unlink()
