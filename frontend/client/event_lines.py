"""Server-sent events as a client reads them."""

from collections.abc import Iterable, Iterator

_DATA = b"data:"
_END = b"[DONE]"


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event up to `[DONE]`; each is one line, as in OpenAI's streams.

    Raises EOFError where the bytes end before that. Lines end at a newline alone: JSON may hold the other characters
    that Python takes for line ends.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA).strip()
            if data == _END:
                return
            yield data
    raise EOFError("the stream ended without [DONE]")
