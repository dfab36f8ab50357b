"""Processes that listen on TCP ports here, and the refusal that names them."""

from contextlib import suppress
from pathlib import Path

from tandem.frontend.supervisor.model import AddressInUseError

_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


class PortInUseError(AddressInUseError):
    """A port that another process has.

    Its text names that process, which is looked for when the text is read: a start tries many times, or many ports.
    """

    def __init__(self, port: int, before: str, after: str) -> None:
        """Keep what the text has before and after the name of the process."""
        super().__init__(before, after)
        self.port = port

    def __str__(self) -> str:
        before, after = self.args
        return f"{before} {port_owner(self.port)}{after}"


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """Return the name and number of the process that listens on a port.

    It is "another process" where the kernel does not tell: one of another user, or of another container.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                name = (process / "comm").read_bytes().strip().decode(errors="replace")
                shown = "".join(character if character.isprintable() else "?" for character in name)
                return f"{shown} (process {process.name})"
    return "another process"


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
