"""JSON responses that may be large."""

import asyncio
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, Reservation
from tandem.frontend.api.live_stream import WRITER_KEY, AnswerWriter
from tandem.frontend.listening import ConnectionLimits

PIECE_BYTES = 64 * 1024
"""Bytes passed to the connection at a time, once the client has read previous ones."""


class LargeAnswer(Response):
    """Response that sends a body of several parts in chunks, as fast as the client reads.

    Parts are not joined, and each chunk waits until the client has read most of the previous one. `reservation` of
    their memory is released at the end. A client that is too slow is disconnected: it has `send_timeout`, plus 1 s for
    each `body_rate` bytes.
    """

    def __init__(self, parts: Sequence[bytes], reservation: Reservation, limits: ConnectionLimits) -> None:
        self._size = sum([len(part) for part in parts])
        headers = {"content-length": str(self._size), "content-type": "application/json"}
        super().__init__(None, headers=headers)
        self._parts = parts
        self._reservation = reservation
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: AnswerWriter = scope[WRITER_KEY]
        seconds = self._limits.send_timeout + self._size / self._limits.body_rate
        overdue = asyncio.get_running_loop().call_later(seconds, writer.abort)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in self._parts:
                for start in range(0, len(part), PIECE_BYTES):
                    if writer.has_left:
                        return
                    piece = part[start : start + PIECE_BYTES]
                    writer.num_written += len(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            overdue.cancel()
            self._reservation.release()


def json_answer(parts: Sequence[bytes], reservation: Reservation, limits: ConnectionLimits) -> Response:
    """Return the response of these parts of JSON text: whole if it is small, otherwise in chunks."""
    if sum([len(part) for part in parts]) > MAX_INLINE_BODY:
        return LargeAnswer(parts, reservation, limits)
    reservation.release()
    return Response(b"".join(parts), media_type="application/json")
