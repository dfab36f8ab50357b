"""Convert the tokens of a sequence to the text of a choice: detokenize, match stop strings, count."""

from collections.abc import Sequence

from msgspec import Struct, structs

from tandem.frontend.engine.streams import Terminal
from tandem.frontend.generation.detokenizer import AnyDetokenizer
from tandem.frontend.generation.output_tags import NO_TAGS, OutputTags, Part, PartKind, Tag, TagToken, moved
from tandem.frontend.generation.scored_tokens import ScoredToken, ScoredTokens
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished, TokenLogprobs


class ChoiceDelta(Struct, frozen=True):
    """Text and tokens added to a choice.

    A complete choice is a single delta.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[ScoredToken] = ()
    """Log-probabilities of the tokens of `text`, if requested; those of an echoed prompt are in the first delta."""
    mean_logprob: float | None = None
    """Mean log-probability of all tokens, in the last delta of the choice."""
    stop_string: str | None = None
    """Matched stop string, in the last delta of the choice; None if there is none."""
    tags: Sequence[Tag] = ()
    """Tags in `text` that are tokens."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not (self.text or self.token_ids or self.finish_reason)


def concatenated(index: int, parts: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Join consecutive deltas of one choice."""
    if not parts:
        return ChoiceDelta(index, "", [], None)
    ids = [token_id for part in parts for token_id in part.token_ids]
    logprobs = [token for part in parts for token in part.logprobs]
    text = "".join([part.text for part in parts])
    tags: list[Tag] = []
    offset = 0
    for part in parts:
        tags += moved(part.tags, offset)
        offset += len(part.text)
    last = parts[-1]
    return ChoiceDelta(index, text, ids, last.finish_reason, logprobs, last.mean_logprob, last.stop_string, tags)


def joined(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """Join the deltas of each choice into one.

    Choices are in order of their first delta.
    """
    parts: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return [concatenated(index, added) for index, added in parts.items()]


class Choice:
    """Decoder of one sequence to the text of a choice.

    Stop strings are matched from token `min_tokens` on, and after the reasoning unless they contain its closing tag.
    With them, tokens are decoded one at a time, so that the token count ends with the token that completed the stop
    string. With `include_stop`, the matched stop string or token is kept in the text.
    """

    def __init__(
        self,
        index: int,
        detokenizer: AnyDetokenizer,
        matcher: StopMatcher | None,
        min_tokens: int,
        include_stop: bool = False,
        scored: ScoredTokens | None = None,
        tags: OutputTags = NO_TAGS,
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
        """True if a delta needs only the text of tokens."""
        self._tokens = tags.tokens
        self._scanner = None if matcher is None else tags.scanner()
        """Splitter of the reasoning, in which most stop strings are ignored; None once the answer has started."""
        self._tags: list[Tag] = []
        """Tags in the text that was not returned yet."""
        self._num_waiting = 0
        """Number of characters decoded but not returned yet."""
        self._rest = ""
        """Incomplete tag, which is returned together with its end."""
        self._shown = 0
        self._cut = False
        """True once a stop string has truncated the text."""

    def advance(
        self, tokens: Sequence[int], terminal: Terminal | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> ChoiceDelta:
        """Decode new tokens into a delta.

        It has a finish reason once the choice has ended without an error, by a stop string or in the engine.
        """
        if terminal is None and self._is_plain and self._tokens.keys().isdisjoint(tokens):
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

        Tokens after the end of the choice get none.
        """
        deltas: list[ChoiceDelta] = []
        for token in tokens[:-1]:
            deltas.append(self.advance([token], None))
            if deltas[-1].finish_reason is not None:
                return deltas
        return [*deltas, self.advance(tokens[-1:], terminal)]

    def _advance(self, tokens: Sequence[int], terminal: Terminal | None) -> ChoiceDelta:
        finished = terminal if isinstance(terminal, Finished) else None
        # The stop token counts, but is in the text only on request.
        hidden = int(finished is not None and finished.stop_token_id is not None and not self._include_stop)
        shown = tokens[: len(tokens) - hidden]
        text, used, stop = self._decode(shown)
        if stop is not None:
            self.num_tokens += used
            return self._ended(text, tokens[:used], FinishReason.STOP, stop)
        self.num_tokens += len(tokens)
        if finished is None or finished.reason is FinishReason.ABORT:
            text, tags = self._returned(text)
            return ChoiceDelta(self.index, text, tokens, None, tags=tags)
        tail, stop = self._close()
        return self._ended(text + tail, tokens, finished.reason if stop is None else FinishReason.STOP, stop)

    def _ended(self, text: str, tokens: Sequence[int], reason: FinishReason, stop: str | None) -> ChoiceDelta:
        self._cut = stop is not None
        # A tag truncated by the stop string is text.
        text = self._rest + text
        tags = [tag for tag in self._tags if tag.end <= len(text)]
        return ChoiceDelta(self.index, text, tokens, reason.value, stop_string=stop, tags=tags)

    def _returned(self, text: str) -> tuple[str, list[Tag]]:
        """Return text with its tags, without an incomplete tag at its end."""
        if not self._tags:
            self._num_waiting -= len(text)
            return text, []
        text, self._rest = self._rest + text, ""
        tags = [tag for tag in self._tags if tag.end <= len(text)]
        waiting = self._tags[len(tags) :]
        if waiting and waiting[0].offset < len(text):
            text, self._rest = text[: waiting[0].offset], text[waiting[0].offset :]
        self._tags = moved(waiting, -len(text))
        self._num_waiting -= len(text)
        return text, tags

    def _decode(self, tokens: Sequence[int]) -> tuple[str, int, str | None]:
        """Decode tokens, up to the end of a stop string.

        Return their text, the number of tokens used, and the matched stop string or None.
        """
        if self._matcher is None:
            return "".join([self._decode_one(token) for token in tokens]), len(tokens), None
        parts: list[str] = []
        for used, token in enumerate(tokens, 1):
            text = self._decode_one(token)
            stop = self._match(text, self._tokens.get(token), self.num_tokens + used > self._min_tokens, parts)
            if stop is not None:
                return "".join(parts), used, stop
        return "".join(parts), len(tokens), None

    def _decode_one(self, token: int) -> str:
        text = self._push(token)
        if (tag := self._tokens.get(token)) is not None:
            self._tags.append(Tag(self._num_waiting + len(text) - len(tag.text), tag))
        self._num_waiting += len(text)
        return text

    def _match(self, text: str, tag: TagToken | None, is_matched: bool, parts: list[str]) -> str | None:
        """Append the text that is safe to return; return the matched stop string.

        Text that ends in a tag has its token.
        """
        if self._scanner is None:
            return self._match_part(text, False, is_matched, parts)
        found = self._scanner.push(text if tag is None else text[: -len(tag.text)])
        if tag is not None:
            found += self._scanner.push(tag.text, tag)
        if self._scanner.is_answer:
            self._scanner = None
        return self._match_parts(found, is_matched, parts)

    def _match_parts(self, found: Sequence[Part], is_matched: bool, parts: list[str]) -> str | None:
        for part in found:
            stop = self._match_part(part.text, part.kind is not PartKind.ANSWER, is_matched, parts)
            if stop is not None:
                return stop
        return None

    def _match_part(self, text: str, is_thought: bool, is_matched: bool, parts: list[str]) -> str | None:
        if not is_matched:
            parts.append(text)
            return None
        assert self._matcher is not None, f"no stop strings to find in {text!r}"
        safe, stop = self._matcher.push(text, is_thought)
        parts.append(safe)
        if stop is not None and self._include_stop:
            parts.append(stop)
        return stop

    def _push_scored(self, token: int) -> str:
        assert self._scored is not None
        text = self._detokenizer.push(token)
        self._scored.push(token, len(text))
        return text

    def _close(self) -> tuple[str, str | None]:
        """Flush the decoder and the matcher at the end of the sequence.

        Return the last text, and the stop string that it matches, or None.
        """
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail, None
        parts: list[str] = []
        stop = self._match(tail, None, True, parts)
        if stop is None and self._scanner is not None:
            stop = self._match_parts(self._scanner.finish(), True, parts)
        if stop is None:
            parts.append(self._matcher.flush())
        return "".join(parts), stop
