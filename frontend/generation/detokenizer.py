"""Incremental detokenizer in constant time per token.

Characters split across tokens are returned whole.
"""

from collections.abc import Callable, Mapping, Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

from tandem.frontend.generation.output_tags import TagToken

MAX_HELD_IDS = 32
"""Maximum number of token ids held back because of an incomplete character. A character has at most four bytes, so more
ids are invalid UTF-8, which would otherwise be decoded again for each token."""

_TAIL_IDS = 8
"""Number of ids still held back after a flush: enough for the start of any character."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental decoder of a sequence, for any tokenizer.

    The concatenated texts equal `decode` of all ids. `anchor` is decoded in front of the output but not returned (see
    `tokenizer._anchor`). `_held` are the ids since the last returned text; they start at a character boundary.
    """

    __slots__ = ("_anchor", "_held", "_raw", "_skip_special", "_stream")

    def __init__(self, raw: tokenizers.Tokenizer, anchor: Sequence[int] = (), skip_special: bool = True) -> None:
        self._raw = raw
        self._skip_special = skip_special
        self._anchor = list(anchor)
        self._held: list[int] = []
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        """Decode one more id and return the text that it completes.

        The text may be empty or come from several ids.
        """
        self._held.append(token_id)
        try:
            text = self._stream.step(self._raw, token_id)
        except Exception:  # "Invalid prefix", a plain Exception, after which the stream is unusable
            return self._restart()
        if text is not None:
            self._held.clear()
            return str(text)
        return self._force() if len(self._held) >= MAX_HELD_IDS else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Decode more ids and return the text that they complete."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the text of the held ids at the end of the sequence.

        An incomplete character becomes U+FFFD.
        """
        held, self._held = self._held, []
        return self._decode(held)

    def _restart(self) -> str:
        """Restart with a new stream from the held ids."""
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
        """Return the text of the held ids that cannot be part of an incomplete character."""
        text, self._held = _settled(self._held, self._decode)
        self._stream = self._new_stream()
        for token_id in self._held:
            self._stream.step(self._raw, token_id)
        return text

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


class ByteDetokenizer:
    """Incremental decoder of a sequence for a byte-level tokenizer.

    Each call returns the same as `Detokenizer`. Ids that end at a character boundary cost one lookup each and one
    decoding together.
    """

    __slots__ = ("_bytes_of", "_held")

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        """Initialize with the bytes of each id."""
        self._bytes_of = bytes_of
        self._held: list[int] = []
        """Ids since the last returned text; they start at a character boundary."""

    def push(self, token_id: int) -> str:
        """Decode one more id and return the text that it completes.

        The text may be empty or come from several ids.
        """
        if not self._held:
            text = self._bytes_of[token_id].decode("utf-8", "replace")
            if text and text[-1] != _REPLACEMENT:
                return text
        self._held.append(token_id)
        text = self._decode(self._held)
        if text and text[-1] != _REPLACEMENT:
            self._held.clear()
            return text
        return self._force() if len(self._held) >= MAX_HELD_IDS else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Decode more ids and return the text that they complete."""
        if not token_ids:
            return ""
        if self._bytes_of[token_ids[-1]]:
            text = self._decode([*self._held, *token_ids] if self._held else token_ids)
            if text[-1] != _REPLACEMENT:  # the last id completes all held ids
                self._held.clear()
                return text
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the text of the held ids at the end of the sequence.

        An incomplete character becomes U+FFFD.
        """
        held, self._held = self._held, []
        return self._decode(held)

    def _force(self) -> str:
        """Return the text of the held ids that cannot be part of an incomplete character."""
        text, self._held = _settled(self._held, self._decode)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        return b"".join([bytes_of[token_id] for token_id in ids]).decode("utf-8", "replace")


class TagDetokenizer:
    """Incremental decoder of a sequence that keeps the text of tag tokens.

    It does so even if special tokens are skipped. A tag flushes the text before it, so that the token's text is exactly
    the tag.
    """

    __slots__ = ("_inner", "_new_inner", "_tags")

    def __init__(self, new_inner: "Callable[[], Detokenizer | ByteDetokenizer]", tags: Mapping[int, TagToken]) -> None:
        """Initialize. new_inner: creates a decoder for the text between two tags."""
        self._new_inner = new_inner
        self._inner = new_inner()
        self._tags = tags

    def push(self, token_id: int) -> str:
        """Decode one more id and return the text that it completes."""
        tag = self._tags.get(token_id)
        if tag is None:
            return self._inner.push(token_id)
        text = self._inner.flush() + tag.text
        self._inner = self._new_inner()
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Decode more ids and return the text that they complete."""
        if self._tags.keys().isdisjoint(token_ids):
            return self._inner.push_all(token_ids)
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the text of the held ids at the end of the sequence."""
        return self._inner.flush()


def _settled(held: list[int], decode: Callable[[list[int]], str]) -> tuple[str, list[int]]:
    """Split held ids into final text and the remaining ids.

    A split is at a character boundary if and only if both sides decode to the whole. Skipped special tokens have no
    text and are dropped, so that the remaining ids suffice for the start of any character.
    """
    spelled = [token_id for token_id in held if decode([token_id])]
    whole = decode(spelled)
    for keep in range(_TAIL_IDS, 0, -1):
        head, tail = decode(spelled[:-keep]), spelled[-keep:]
        if head + decode(tail) == whole:
            return head, tail
    return "", spelled


AnyDetokenizer = Detokenizer | ByteDetokenizer | TagDetokenizer
