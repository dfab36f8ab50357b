"""The process that listens on a TCP port of this machine."""

import errno
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """Return the name and number of the process that listens on a port.

    It is "another process" where the kernel does not tell: one of another user, or of another container.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "another process"


def used_by(port: int, error: OSError) -> str:
    """Return who has a port, to follow the text of an error; "" if it is not in use."""
    return f", used by {port_owner(port)}" if error.errno == errno.EADDRINUSE else ""


def _inodes(port: int, proc: Path) -> set[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
