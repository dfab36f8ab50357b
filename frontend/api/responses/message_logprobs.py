"""Log-probabilities of the messages within an output."""

from collections.abc import Sequence
from typing import Any

from tandem.frontend.api.logprobs import chat_logprobs
from tandem.frontend.generation.scored_tokens import ScoredToken


class MessageLogprobs:
    """Find the tokens of each message among all tokens of an output.

    Tokens of reasoning, calls and the tags around them are not part of a message.
    """

    def __init__(self) -> None:
        self._tokens: list[ScoredToken] = []
        self._first = 0
        """Index of the first token not yet assigned to a message."""

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Append the next tokens of the output."""
        self._tokens += tokens

    def take(self, text: str) -> list[dict[str, Any]]:
        """Return the log-probabilities of the next message's tokens in OpenAI's format.

        `text` is the text of the message; it is searched for after the end of the previous message.
        """
        tokens = self._tokens[self._first :]
        target = text.encode()
        start = b"".join([token.token for token in tokens]).find(target)
        if start < 0 or not target:
            return []
        offset, end, found = 0, start + len(target), []
        for token in tokens:
            if offset >= end:
                break
            offset += len(token.token)
            self._first += 1
            if offset > start:
                found.append(token)
        content: list[dict[str, Any]] = chat_logprobs(found)["content"]
        return content
