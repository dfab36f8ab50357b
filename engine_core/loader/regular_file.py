"""Files of a checkpoint, opened so that nothing but a file is read and nothing blocks."""

import errno
import os
import stat

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file as `os.open` does; links are followed.

    Raises OSError, also for a pipe, a device, a socket or a folder: reading a pipe would block until somebody writes.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket, or a device without a driver.
            raise OSError(error.errno, "it is a socket or a device, not a file", path) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'of another kind')}, not a file", path)
    return descriptor
