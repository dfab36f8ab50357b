"""Server-sent events of a completion, put together from parts that are encoded once a request."""

import msgspec

from frontend.choice import Piece
from frontend.errors import ApiError
from frontend.generation import Usage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of a reply, and the whole reply, begins with. Field order is the order on the wire."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChunks:
    """Formats the chunks of one reply: prefix + encoded text + suffix, no object built for a token."""

    def __init__(self, head: ReplyHead, include_usage: bool, with_ids: bool) -> None:
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._with_ids = with_ids
        self._prefixes: dict[int, bytes] = {}

    def piece(self, piece: Piece) -> bytes:
        """The chunk of a piece, or nothing where it has nothing to show."""
        if not (piece.text or piece.finish_reason or (self._with_ids and piece.token_ids)):
            return b""
        return self._chunk(piece, b"")

    def prompt(self, index: int, text: str, prompt_ids: list[int]) -> bytes:
        """The first chunk of a choice: the echoed prompt, and its ids where asked for."""
        ids = b',"prompt_token_ids":' + _encode(prompt_ids) if self._with_ids else b""
        return self._chunk(Piece(index, text, [], None), ids)

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the last, without choices."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def _chunk(self, piece: Piece, extra: bytes) -> bytes:
        prefix = self._prefixes.get(piece.index)
        if prefix is None:
            prefix = b'%b,"choices":[{"index":%d,"logprobs":null,"text":' % (self._head, piece.index)
            self._prefixes[piece.index] = prefix
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._with_ids else b""
        finish = b'"%b"' % piece.finish_reason.encode() if piece.finish_reason else b"null"
        return b'%b%b%b%b,"finish_reason":%b}]%b' % (prefix, _encode(piece.text), ids, extra, finish, self._tail)


def error_event(error: ApiError) -> bytes:
    """How an error is told once the status has been sent: an event with the error body, and the end."""
    return b"data: " + error.body() + b"\n\n" + DONE
