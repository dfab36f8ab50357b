"""Socket between a frontend and its template process."""

import asyncio
import socket
from collections.abc import Callable

from tandem.frontend.chat.render_frames import HEADER

_READ_BYTES = 256 * 1024


class RenderConnection:
    """Socket to a process, with a callback for each received frame.

    It uses the event loop's readers and writers, not a transport: most conversations need one `send` and one `recv`.
    """

    def __init__(self, received: "Callable[[RenderConnection, int, bytes], None]") -> None:
        """Initialize the connection.

        received: called with the type and text of each frame.
        """
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set once the process has closed the socket or exited."""
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._sock: socket.socket | None = None
        self._partial = bytearray()
        """Start of an incomplete frame."""
        self._unsent = bytearray()
        """Frames waiting for room in the socket's buffer."""

    def open(self, sock: socket.socket) -> None:
        """Take over a socket."""
        self._sock = sock
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read, sock)

    def write(self, data: bytes) -> None:
        """Send frames, if the process is running."""
        sock = self._sock
        if sock is None:
            return
        sent = 0 if self._unsent else _send(sock, data)
        if sent < len(data):
            if not self._unsent:
                self._loop.add_writer(sock, self._write_rest, sock)
            self._unsent += data[sent:]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()
        if not self.lost.done():
            self.lost.set_result(None)

    def _write_rest(self, sock: socket.socket) -> None:
        del self._unsent[: _send(sock, self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(sock)

    def _read(self, sock: socket.socket) -> None:
        data = b""
        try:
            data = sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # reset by a process that exited with unread requests
            pass
        if not data:
            self.close()
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < _length(self._partial):
                return
            data = bytes(self._partial)
            self._partial.clear()
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Process the complete frames of `data`, and keep the rest."""
        begin = 0
        while len(data) - begin >= HEADER.size:
            length, kind = HEADER.unpack_from(data, begin)
            end = begin + HEADER.size + length
            if end > len(data):
                break
            text = data[begin + HEADER.size : end]
            begin = end
            self._received(self, kind, text)
        self._partial += data[begin:]


def _length(data: bytearray) -> int:
    """Return the length of the first frame.

    It is the header's length while that is incomplete.
    """
    return HEADER.size + (HEADER.unpack_from(data)[0] if len(data) >= HEADER.size else 0)


def _send(sock: socket.socket, data: bytes | bytearray) -> int:
    """Send as much as the socket accepts; return the number of bytes.

    Data for a process that has exited counts as sent.
    """
    try:
        return sock.send(data)
    except (BlockingIOError, InterruptedError):
        return 0
    except OSError:
        return len(data)
