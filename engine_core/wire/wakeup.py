"""How other threads wake the loop: a byte through a pair of sockets, which it polls beside its ROUTER."""

import socket


class LoopWaker:
    """One thread waits on `reader`, any thread calls `wake`."""

    def __init__(self, reader: socket.socket, writer: socket.socket) -> None:
        """Both do not block."""
        self.reader = reader
        self.writer = writer

    @classmethod
    def open(cls) -> "LoopWaker":
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        return cls(reader, writer)

    def wake(self) -> None:
        """A full buffer is as good as a byte, and a closed one has nobody to wake."""
        try:
            self.writer.send(b"\0")
        except (BlockingIOError, OSError):
            return

    def clear(self) -> None:
        """Forgets every call so far."""
        try:
            while self.reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
