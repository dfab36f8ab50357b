"""Log-probabilities in the formats of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.scored_tokens import LOWEST, ScoredToken


def completion_logprobs(tokens: Sequence[ScoredToken], as_ids: bool = False) -> dict[str, Any]:
    """Format tokens for `/v1/completions`, as parallel lists.

    A token that is not valid UTF-8 is written as `bytes:\\xe2\\x80`. Each object of `top_logprobs` has the most
    probable tokens and the token itself: one more if it is not among them. Tokens with the same text share an entry,
    the most probable one's. as_ids: write tokens as `token_id:9` (`return_tokens_as_token_ids`).
    """
    return {
        "tokens": [_id_text(token.token_id) if as_ids else _completion_text(token.token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_completion_top(token, as_ids) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken], as_ids: bool = False) -> dict[str, Any]:
    """Format tokens for `/v1/chat/completions`, one object with bytes per token.

    as_ids: write tokens as `token_id:9` (`return_tokens_as_token_ids`).
    """
    content: list[dict[str, Any]] = []
    for token in tokens:
        own = _chat_token(token.token, LOWEST if token.logprob is None else token.logprob)
        top = [_chat_token(other, logprob) for other, logprob in token.alternatives]
        if as_ids:
            own["token"] = _id_text(token.token_id)
            for shown, token_id in zip(top, token.alternative_ids, strict=True):
                shown["token"] = _id_text(token_id)
        content.append(own | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[ScoredToken]) -> list[dict[str, dict[str, Any]] | None]:
    """Format the tokens of a prompt in vLLM's shape: null for the first, then tokens by their ids.

    The token of the prompt comes first, with its rank in the whole vocabulary.
    """
    return [None if token.logprob is None else _ranked(token, token.logprob) for token in tokens]


def _ranked(token: ScoredToken, logprob: float) -> dict[str, dict[str, Any]]:
    ids = list(token.alternative_ids)
    found = {str(token.token_id): {"logprob": logprob, "rank": token.rank, "decoded_token": _text(token.token)}}
    for number, (token_id, (other, value)) in enumerate(zip(ids, token.alternatives, strict=True), 1):
        found.setdefault(str(token_id), {"logprob": value, "rank": number, "decoded_token": _text(other)})
    return found


def keep_best(choices: Sequence[ChoiceDelta], of: int, keep: int) -> list[ChoiceDelta]:
    """Select the best choices of each prompt, best first (`best_of`).

    Of every `of` complete choices, the `keep` with the highest mean log-probability are returned.
    """
    kept: list[ChoiceDelta] = []
    for start in range(0, len(choices), of):
        ranked = sorted(choices[start : start + of], key=lambda piece: -(piece.mean_logprob or 0.0))
        kept += ranked[:keep]
    return kept


def _completion_top(token: ScoredToken, as_ids: bool) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    if as_ids:
        for token_id, (_, logprob) in zip(token.alternative_ids, token.alternatives, strict=True):
            top[_id_text(token_id)] = logprob
        return {**top, _id_text(token.token_id): token.logprob}
    for other, logprob in (*token.alternatives, (token.token, token.logprob)):
        top.setdefault(_completion_text(other), logprob)
    return top


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


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
