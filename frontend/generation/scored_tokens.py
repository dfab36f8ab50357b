"""Log-probabilities of a sequence, released together with its text."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tandem.frontend.generation.detokenizer import AnyDetokenizer
from tandem.protocol.codec import read_logprobs, unpack_ids
from tandem.protocol.events import TokenLogprobs

LOWEST = -9999.0
"""Value that OpenAI reports for a token of probability 0; JSON has neither infinities nor NaN."""

Line = tuple[float, list[int], list[float]]
"""Entry of `read_logprobs`: log-probability of the token, then ids and log-probabilities of the alternatives."""


class ScoredToken(Struct, frozen=True):
    """Token with its log-probability and those of its alternatives.

    The alternatives are the most probable tokens at its position, in descending order.
    """

    token: bytes
    logprob: float | None
    """Log-probability of the token; None for the first token of a prompt."""
    alternatives: list[tuple[bytes, float]]
    offset: int
    """Character offset of the token. All tokens of one character have the offset of that character."""
    token_id: int = -1
    alternative_ids: Sequence[int] = ()
    """Ids of `alternatives`."""
    rank_of_all: int | None = None
    """Rank of the token in the whole vocabulary; None: it is not known, as for generated tokens."""

    @property
    def rank(self) -> int | None:
        """Rank of the token, 1 for the most probable one.

        None if it is not among the alternatives and no other rank is known.
        """
        ids = list(self.alternative_ids)
        if self.token_id in ids:
            return ids.index(self.token_id) + 1
        # Alternatives are ordered by rounded log-probabilities, so a tie may look otherwise.
        return None if self.rank_of_all is None else max(self.rank_of_all, len(ids) + 1)


class EchoedPrompt(Struct, frozen=True):
    """Prompt with log-probabilities, which are reported before the output's."""

    ids: Sequence[int]
    offsets: Sequence[int]


class ScoredTokens:
    """Queue that releases each token once part of its text has been sent.

    The rest is released at the end. Log-probabilities are thus held back like their text, and tokens truncated by a
    stop string are never returned.
    """

    def __init__(self, spell: Callable[[int], bytes], prompt_len: int, base: int, prompt: EchoedPrompt | None) -> None:
        """Initialize for a sequence.

        base: character offset of the output. spell: returns the bytes of a token id. prompt_len: prompt tokens.
        """
        self._spell = spell
        self._prompt_len = prompt_len
        self._base = base
        self._prompt = prompt
        self._prompt_lines: list[Line] = []
        self._prompt_ranks: list[int | None] = []
        self._lines: deque[Line] = deque()
        self._waiting: deque[ScoredToken] = deque()
        self._characters = 0
        self._total = 0.0
        self._count = 0

    @property
    def mean(self) -> float:
        """Mean log-probability of the output so far."""
        return self._total / max(self._count, 1)

    def take(self, parts: Iterable[TokenLogprobs]) -> None:
        """Add log-probabilities from the engine.

        They belong to the prompt, and to tokens that are passed to `push`.
        """
        for part in parts:
            lines = read_logprobs(part)
            if part.start < self._prompt_len:
                self._prompt_lines += lines
                self._prompt_ranks += unpack_ids(part.ranks) if part.ranks else [None] * len(lines)
            else:
                self._lines += lines

    def push(self, token_id: int, characters: int) -> None:
        """Append the next token of the output.

        characters: number of characters that the decoder returned for it.
        """
        line = self._lines.popleft()
        self._waiting.append(self._scored(token_id, line, self._base + self._characters))
        self._characters += characters
        self._count_in(finite(line[0]))

    def release(self, shown: int) -> list[ScoredToken]:
        """Return the tokens released by the text sent so far.

        These are the tokens of the first `shown` characters of the output that were not returned before.
        """
        end = self._base + shown
        tokens = self._opening()
        while self._waiting and self._waiting[0].offset < end:
            tokens.append(self._waiting.popleft())
        return tokens

    def flush(self) -> list[ScoredToken]:
        """Return all remaining tokens at the end of the output.

        All of its text has been sent. A stop token that was not pushed, because it has no text, counts only for the
        mean.
        """
        tokens = [*self._opening(), *self._waiting]
        self._waiting.clear()
        for own, _, _ in self._lines:
            self._count_in(finite(own))
        self._lines.clear()
        return tokens

    def _opening(self) -> list[ScoredToken]:
        """Return the tokens of the echoed prompt, on the first call."""
        prompt, self._prompt = self._prompt, None
        if prompt is None:
            return []
        first = ScoredToken(self._spell(prompt.ids[0]), None, [], prompt.offsets[0], prompt.ids[0])
        rest = zip(prompt.ids[1:], self._prompt_lines, prompt.offsets[1:], self._prompt_ranks, strict=True)
        return [first, *[self._scored(token_id, line, offset, rank) for token_id, line, offset, rank in rest]]

    def _count_in(self, logprob: float) -> None:
        self._total += logprob
        self._count += 1

    def _scored(self, token_id: int, line: Line, offset: int, rank: int | None = None) -> ScoredToken:
        own, ids, values = line
        alternatives = [(self._spell(other), finite(value)) for other, value in zip(ids, values, strict=True)]
        return ScoredToken(self._spell(token_id), finite(own), alternatives, offset, token_id, ids, rank)


def finite(logprob: float) -> float:
    """Replace NaN and values below `LOWEST` by `LOWEST`."""
    # NaN compares as false.
    return logprob if logprob > LOWEST else LOWEST


def echoed_prompt(ids: Sequence[int], text: str, detokenizer: AnyDetokenizer) -> EchoedPrompt:
    """Locate the tokens of a prompt in its text.

    Special tokens have no text of their own.
    """
    offsets, characters = [], 0
    for token_id in ids:
        offsets.append(min(characters, len(text)))
        characters += len(detokenizer.push(token_id))
    return EchoedPrompt(ids, offsets)
