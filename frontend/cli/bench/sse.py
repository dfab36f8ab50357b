"""Decode server-sent events from a stream of bytes. No I/O."""


class SseDecoder:
    """Decoder of the `data` of each event, from bytes split anywhere.

    Comments and other fields are dropped. Lines end in LF or CRLF. A bare CR, which the standard allows but servers do
    not send, does not end a line.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that these bytes complete."""
        lines = (self._pending + data).split(b"\n")
        self._pending = lines.pop()
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
