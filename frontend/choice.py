"""One sequence of a request as text: detokenized, cut at a stop string, counted."""

from collections.abc import Sequence

from msgspec import Struct

from frontend.detokenizer import Detokenizer
from frontend.stop_strings import StopMatcher
from frontend.streams import Terminal
from protocol.errors import FinishReason
from protocol.events import Finished


class Piece(Struct, frozen=True):
    """What one delta adds to a choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.token_ids or self.finish_reason)


class Choice:
    """Turns the tokens of one sequence into text.

    Stop strings are looked for from token `min_tokens` on. With them, tokens are decoded one at a time, so that
    the count ends with the token that completed the stop string.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, matcher: StopMatcher | None, min_tokens: int) -> None:
        self.index = index
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens

    def advance(self, tokens: Sequence[int], terminal: Terminal | None) -> Piece:
        """Takes a delta. The piece has a finish reason once the choice has ended well, here or in the engine."""
        finished = terminal if isinstance(terminal, Finished) else None
        # The id that ended a sequence counts, but is not part of its text.
        hidden = int(finished is not None and finished.stop_token_id is not None)
        shown = tokens[: len(tokens) - hidden]
        text, used, stopped = self._decode(shown)
        if stopped:
            self.num_tokens += used
            return Piece(self.index, text, tokens[:used], FinishReason.STOP.value)
        self.num_tokens += len(tokens)
        if finished is None or finished.reason is FinishReason.ABORT:
            return Piece(self.index, text, tokens, None)
        tail, stopped = self._close()
        reason = FinishReason.STOP if stopped else finished.reason
        return Piece(self.index, text + tail, tokens, reason.value)

    def _decode(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Text of these tokens, how many of them it took, and whether a stop string ended it."""
        push = self._detokenizer.push
        matcher = self._matcher
        if matcher is None:
            return "".join([push(token) for token in tokens]), len(tokens), False
        parts: list[str] = []
        for used, token in enumerate(tokens, 1):
            text = push(token)
            if self.num_tokens + used <= self._min_tokens:
                parts.append(text)
                continue
            safe, stop = matcher.push(text)
            parts.append(safe)
            if stop is not None:
                return "".join(parts), used, True
        return "".join(parts), len(tokens), False

    def _close(self) -> tuple[str, bool]:
        """What was held back, by the decoder or for the sake of a stop string; whether one ends it even so."""
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail, False
        safe, stop = self._matcher.push(tail)
        return (safe, True) if stop is not None else (safe + self._matcher.flush(), False)
