"""Token ids to text, one at a time, in O(1) a token and safe on characters split across tokens."""

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

MAX_HELD_IDS = 32
"""Ids held back at most while they end in an incomplete character. A real one has at most four bytes, so more
held ids means bytes that are no UTF-8, which would otherwise be decoded again and again."""

_TAIL_IDS = 8
"""Ids that stay held when the rest is forced out: enough for the start of any character."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The deltas of one sequence; joined, they equal `decode` of all its ids.

    `anchor` is decoded in front of the output and never shown (see `tokenizer._anchor`). `_held` are the ids since
    the last text came out; they begin at the edge of a character.
    """

    __slots__ = ("_anchor", "_held", "_raw", "_skip_special", "_stream")

    def __init__(self, raw: tokenizers.Tokenizer, anchor: Sequence[int] = (), skip_special: bool = True) -> None:
        self._raw = raw
        self._skip_special = skip_special
        self._anchor = list(anchor)
        self._held: list[int] = []
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        """The text that this id completes, often of several ids, and often none."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._raw, token_id)
        except Exception:  # "Invalid prefix": a plain Exception; its stream is of no further use
            return self._restart()
        if text is not None:
            self._held.clear()
            return str(text)
        return self._force() if len(self._held) >= MAX_HELD_IDS else ""

    def flush(self) -> str:
        """What is still held back, at the end of the sequence: an incomplete character becomes U+FFFD."""
        held, self._held = self._held, []
        return self._decode(held)

    def _restart(self) -> str:
        """Goes on from the held ids with a new stream."""
        text = self._decode(self._held)
        if text.endswith(_REPLACEMENT) and len(self._held) < MAX_HELD_IDS:
            text = ""
        else:
            self._held.clear()
        self._stream = self._new_stream()
        for token_id in self._held:
            self._stream.step(self._raw, token_id)
        return text

    def _force(self) -> str:
        """Lets out the ids that cannot be part of an unfinished character.

        A cut is at the edge of a character just where both sides decode to the whole.
        """
        held = self._held
        whole = self._decode(held)
        for keep in range(_TAIL_IDS, 0, -1):
            head = self._decode(held[:-keep])
            if head + self._decode(held[-keep:]) == whole:
                self._held = held[-keep:]
                self._stream = self._new_stream()
                for token_id in self._held:
                    self._stream.step(self._raw, token_id)
                return head
        return ""

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if not self._anchor:
            return str(self._raw.decode(ids, skip_special_tokens=self._skip_special))
        shown = len(self._raw.decode(self._anchor, skip_special_tokens=self._skip_special))
        return str(self._raw.decode(self._anchor + ids, skip_special_tokens=self._skip_special))[shown:]

    def _new_stream(self) -> DecodeStream:
        stream = DecodeStream(skip_special_tokens=self._skip_special)
        for token_id in self._anchor:
            stream.step(self._raw, token_id)
        return stream
