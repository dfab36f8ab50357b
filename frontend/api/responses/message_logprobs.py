"""The log-probabilities of the messages within an output."""

from collections.abc import Sequence
from typing import Any

from tandem.frontend.api.logprobs import chat_logprobs
from tandem.frontend.generation.scored_tokens import ScoredToken


class MessageLogprobs:
    """Find the tokens of each message among all tokens of an output.

    Reasoning, calls and the marks around them are tokens too, but not part of a message.
    """

    def __init__(self) -> None:
        self._tokens: list[ScoredToken] = []
        self._first = 0
        """Index of the first token that belongs to no message yet."""

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Take the next tokens of the output."""
        self._tokens += tokens

    def take(self, text: str) -> list[dict[str, Any]]:
        """Return the tokens of the next message, in OpenAI's form.

        The text of a message is a part of the output's, which begins after the message before it.
        """
        tokens = self._tokens[self._first :]
        wanted = text.encode()
        start = b"".join([token.token for token in tokens]).find(wanted)
        if start < 0 or not wanted:
            return []
        place, end, found = 0, start + len(wanted), []
        for token in tokens:
            if place >= end:
                break
            place += len(token.token)
            self._first += 1
            if place > start:
                found.append(token)
        content: list[dict[str, Any]] = chat_logprobs(found)["content"]
        return content
