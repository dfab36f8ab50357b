"""Text of one sequence: detokenized, cut at a stop string, counted."""

from collections.abc import Sequence

from msgspec import Struct, structs

from tandem.frontend.engine.streams import Terminal
from tandem.frontend.generation.detokenizer import AnyDetokenizer
from tandem.frontend.generation.scored_tokens import ScoredToken, ScoredTokens
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, TokenLogprobs


class ChoiceDelta(Struct, frozen=True):
    """Text and tokens that one update adds to a choice.

    A whole choice is one delta as well.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[ScoredToken] = ()
    """Log-probabilities of the tokens of `text`, if requested; those of an echoed prompt come with the first delta."""
    mean_logprob: float | None = None
    """Mean log-probability of all tokens of the choice, in the delta that ends it."""
    stop_string: str | None = None
    """The stop string that ended the choice, in the delta that ends it; None for any other end."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not (self.text or self.token_ids or self.finish_reason)


def concatenated(index: int, parts: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Join consecutive deltas of one choice into one."""
    if not parts:
        return ChoiceDelta(index, "", [], None)
    ids = [token_id for part in parts for token_id in part.token_ids]
    logprobs = [token for part in parts for token in part.logprobs]
    text = "".join([part.text for part in parts])
    last = parts[-1]
    return ChoiceDelta(index, text, ids, last.finish_reason, logprobs, last.mean_logprob, last.stop_string)


def joined(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """Join the deltas of each choice into one.

    They are in the order in which the choices first appear.
    """
    parts: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return [concatenated(index, added) for index, added in parts.items()]


class Choice:
    """Decoder of the tokens of one sequence to the text of a choice.

    Stop strings are matched from token `min_tokens` on. With them, tokens are decoded one at a time, so that the count
    ends with the token that completed the stop string. `include_stop` keeps the stop string or token that ended the
    text as its last part.
    """

    def __init__(
        self,
        index: int,
        detokenizer: AnyDetokenizer,
        matcher: StopMatcher | None,
        min_tokens: int,
        include_stop: bool = False,
        scored: ScoredTokens | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._scored = scored
        self._push = detokenizer.push if scored is None else self._push_scored
        self._is_plain = matcher is None and scored is None
        """True if the text of tokens is all that a delta needs."""
        self._shown = 0
        self._cut = False
        """True once a stop string has cut the end of the text off."""

    def advance(
        self, tokens: Sequence[int], terminal: Terminal | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> ChoiceDelta:
        """Decode new tokens into a delta.

        It has a finish reason once the choice has ended without an error, by a stop string or in the engine.
        """
        if terminal is None and self._is_plain:
            self.num_tokens += len(tokens)
            text = self._push(tokens[0]) if len(tokens) == 1 else self._detokenizer.push_all(tokens)
            return ChoiceDelta(self.index, text, tokens, None)
        if self._scored is None:
            return self._advance(tokens, terminal)
        self._scored.take(logprobs)
        delta = self._advance(tokens, terminal)
        if delta.is_empty:
            return delta
        self._shown += len(delta.text)
        if delta.finish_reason is None:
            return structs.replace(delta, logprobs=self._scored.release(self._shown))
        shown = self._scored.release(self._shown) if self._cut else self._scored.flush()
        return structs.replace(delta, logprobs=shown, mean_logprob=self._scored.mean)

    def advance_singly(self, tokens: Sequence[int], terminal: Terminal | None) -> list[ChoiceDelta]:
        """Decode new tokens into one delta per token, without log-probabilities.

        Tokens behind the end of the choice get none.
        """
        deltas: list[ChoiceDelta] = []
        for token in tokens[:-1]:
            deltas.append(self.advance([token], None))
            if deltas[-1].finish_reason is not None:
                return deltas
        return [*deltas, self.advance(tokens[-1:], terminal)]

    def _advance(self, tokens: Sequence[int], terminal: Terminal | None) -> ChoiceDelta:
        finished = terminal if isinstance(terminal, Finished) else None
        # The id that ended a sequence counts, but is part of its text only on request.
        hidden = int(finished is not None and finished.stop_token_id is not None and not self._include_stop)
        shown = tokens[: len(tokens) - hidden]
        text, used, stop = self._decode(shown)
        if stop is not None:
            self._cut = True
            self.num_tokens += used
            return ChoiceDelta(self.index, text, tokens[:used], FinishReason.STOP.value, stop_string=stop)
        self.num_tokens += len(tokens)
        if finished is None or finished.reason is FinishReason.ABORT:
            return ChoiceDelta(self.index, text, tokens, None)
        tail, stop = self._close()
        self._cut = stop is not None
        reason = finished.reason if stop is None else FinishReason.STOP
        return ChoiceDelta(self.index, text + tail, tokens, reason.value, stop_string=stop)

    def _decode(self, tokens: Sequence[int]) -> tuple[str, int, str | None]:
        """Decode tokens, up to the end of a stop string.

        Return their text, the number of tokens used, and the stop string that ended the text, or None.
        """
        push, matcher = self._push, self._matcher
        if matcher is None:
            return "".join([push(token) for token in tokens]), len(tokens), None
        parts: list[str] = []
        for used, token in enumerate(tokens, 1):
            text = push(token)
            if self.num_tokens + used <= self._min_tokens:
                parts.append(text)
                continue
            safe, stop = matcher.push(text)
            parts.append(safe)
            if stop is not None:
                parts.append(stop if self._include_stop else "")
                return "".join(parts), used, stop
        return "".join(parts), len(tokens), None

    def _push_scored(self, token: int) -> str:
        assert self._scored is not None
        text = self._detokenizer.push(token)
        self._scored.push(token, len(text))
        return text

    def _close(self) -> tuple[str, str | None]:
        """Flush the decoder and the matcher at the end of the sequence.

        Return the last text, and the stop string that ends it after all, or None.
        """
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail, None
        safe, stop = self._matcher.push(tail)
        if stop is not None:
            return safe + (stop if self._include_stop else ""), stop
        return safe + self._matcher.flush(), None
