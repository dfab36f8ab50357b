"""Wake-up of the loop by other threads.

A byte goes through a pair of sockets, which the loop polls together with its ROUTER.
"""

import socket


class LoopWaker:
    """A pair of sockets: one thread polls `reader`, any thread calls `wake`."""

    def __init__(self, reader: socket.socket, writer: socket.socket) -> None:
        """reader, writer: a connected pair of non-blocking sockets."""
        self.reader = reader
        self.writer = writer

    @classmethod
    def open(cls) -> "LoopWaker":
        """Open the pair of sockets."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        return cls(reader, writer)

    def wake(self) -> None:
        """Wake the loop.

        Errors are ignored: a full buffer wakes the loop as well, and a closed socket means that the loop has ended.
        """
        try:
            self.writer.send(b"\0")
        except (BlockingIOError, OSError):
            return

    def clear(self) -> None:
        """Discard the effect of all `wake` calls so far."""
        try:
            while self.reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both sockets."""
        self.reader.close()
        self.writer.close()
