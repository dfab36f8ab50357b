"""Log-probabilities in the formats of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.scored_tokens import LOWEST, ScoredToken


def completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Format tokens for `/v1/completions`, as parallel lists.

    A token that is not valid UTF-8 is written as `bytes:\\xe2\\x80`. Each object of `top_logprobs` has the most
    probable tokens and the token itself: one more if it is not among them. Tokens with the same text share an entry,
    the most probable one's.
    """
    return {
        "tokens": [_completion_text(token.token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_completion_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Format tokens for `/v1/chat/completions`, one object with bytes per token."""
    content = [
        _chat_token(token.token, LOWEST if token.logprob is None else token.logprob)
        | {"top_logprobs": [_chat_token(other, logprob) for other, logprob in token.alternatives]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def keep_best(choices: Sequence[ChoiceDelta], of: int, keep: int) -> list[ChoiceDelta]:
    """Select the best choices of each prompt, best first (`best_of`).

    Of every `of` complete choices, the `keep` with the highest mean log-probability are returned.
    """
    kept: list[ChoiceDelta] = []
    for start in range(0, len(choices), of):
        ranked = sorted(choices[start : start + of], key=lambda piece: -(piece.mean_logprob or 0.0))
        kept += ranked[:keep]
    return kept


def _completion_top(token: ScoredToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for other, logprob in (*token.alternatives, (token.token, token.logprob)):
        top.setdefault(_completion_text(other), logprob)
    return top


def _completion_text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + _escaped(token)


def _chat_token(token: bytes, logprob: float) -> dict[str, Any]:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        text = _escaped(token)
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _escaped(token: bytes) -> str:
    return "".join([f"\\x{byte:02x}" for byte in token])
