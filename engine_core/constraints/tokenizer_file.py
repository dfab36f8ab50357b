"""Read a tokenizer.json for a vocabulary that may be smaller than the tokenizer's.

Gemma 3 1B and Code Llama 34B, for example, have tokens that the model has no logits for.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct


class _Token(Struct):
    id: int = 0


class _Model(Struct):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(Struct):
    added_tokens: list[_Token] = []
    model: _Model = msgspec.field(default_factory=_Model)


def tokenizer_source(file: Path, vocab_size: int) -> str:
    """Return the source from which llguidance loads the tokenizer: its path, or JSON without the ids from `vocab_size`
    on.

    A file that cannot be read here is passed to llguidance, which reports the error.
    """
    data = file.read_bytes()
    try:
        found = msgspec.json.decode(data, type=_Tokenizer)
    except msgspec.MsgspecError:
        return str(file)
    vocab = found.model.vocab
    largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    largest = max([largest, *(token.id for token in found.added_tokens)])
    if largest < vocab_size:
        return str(file)
    return msgspec.json.encode(_cut(msgspec.json.decode(data), vocab_size)).decode()


def _cut(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Drop the ids from `vocab_size` on, with the merges that lead to them."""
    model = dict(tokenizer["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: an id is an index.
        model["vocab"] = vocab[:vocab_size]
        if (model.get("unk_id") or 0) >= vocab_size:
            model["unk_id"] = None
    else:
        kept = {text: token_id for text, token_id in vocab.items() if token_id < vocab_size}
        model["vocab"] = kept
        # Of BPE, None means that there is none; WordPiece and WordLevel look theirs up only where they need it.
        if model.get("type", "BPE") == "BPE" and model.get("unk_token") not in kept:
            model["unk_token"] = None
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge, prefix, model["vocab"])]
    added = [token for token in tokenizer.get("added_tokens") or () if token["id"] < vocab_size]
    return {**tokenizer, "added_tokens": added, "model": model}


def _is_kept(merge: Any, prefix: str, vocab: dict[str, int]) -> bool:
    """Return whether both parts of a merge and its result are in the vocabulary.

    merge: two texts, in older files one with a space in between; prefix: the prefix of a token within a word.
    """
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab
