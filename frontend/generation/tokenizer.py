"""Text to token ids and back, from the model folder's `tokenizer.json` alone."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import tokenizers

from tandem.frontend.generation.detokenizer import Detokenizer
from tandem.frontend.generation.token_bytes import TokenBytes, token_bytes

SHORT_TEXT_CHARS = 256
"""Texts up to this length are encoded in place: handing them to a thread costs more than the encoding."""


class TokenizerError(Exception):
    """The model folder has no usable tokenizer; the text names the remedy."""


class Tokenizer:
    """A `tokenizers.Tokenizer`, its fingerprint, and threads for texts that would hold the event loop up."""

    def __init__(self, raw: tokenizers.Tokenizer, fingerprint: str, workers: ThreadPoolExecutor) -> None:
        self._raw = raw
        self.fingerprint = fingerprint
        self._workers = workers
        self._anchor = _anchor(raw)
        self._longest = max((len(token) for token in raw.get_vocab()), default=1)

    @property
    def vocab_size(self) -> int:
        return self._raw.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """The id of what is one token of the vocabulary."""
        return self._raw.token_to_id(token)

    @cached_property
    def bytes_of(self) -> TokenBytes:
        """The bytes that a token id stands for."""
        return token_bytes(self._raw)

    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that no text is encoded to, by what they are called."""
        added = self._raw.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return Detokenizer(self._raw, self._anchor, skip_special_tokens)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with whatever the tokenizer's own template adds (such as a begin token) or without."""
        if len(text) <= SHORT_TEXT_CHARS:
            return self._encode(text, add_special_tokens)
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._workers, self._encode, text, add_special_tokens)

    def fewest(self, text: str) -> int:
        """A number of tokens that the text has at least, for nothing: refuses monsters without encoding them."""
        return len(text) // self._longest

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of these ids."""
        (text,) = self._raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    async def decode_many(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of any number of ids, decoded in a thread."""
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._workers, self.decode, ids, skip_special_tokens)

    def names(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls these tokens; empty for ids that it lacks."""
        return [self._raw.id_to_token(token_id) or "" for token_id in ids]

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Calls for one text keep the interpreter to themselves to their end; those for several do not.
        (encoded,) = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids


def _anchor(raw: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids to decode ahead of an output so that its leading space survives; empty where it does anyway.

    Decoders in the SentencePiece manner drop the space in front of the first word of a text. The output of a
    completion continues a prompt, so that space belongs to it. Ids of the prompt itself would not do: they may
    end in the middle of a UTF-8 character.
    """
    ids: list[int] = raw.encode("a a", add_special_tokens=False).ids
    first, rest = ids[:1], ids[1:]
    whole, alone = raw.decode(ids), raw.decode(rest)
    return () if raw.decode(first) + alone == whole else tuple(first)


def load_tokenizer(model_dir: Path, threads: int = 2) -> Tokenizer:
    """Reads `model_dir/tokenizer.json`. Raises TokenizerError if it is missing or broken."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{model_dir} has no tokenizer.json; convert the checkpoint's tokenizer once with transformers: "
            f"AutoTokenizer.from_pretrained({str(model_dir)!r}).save_pretrained({str(model_dir)!r})"
        )
    data = path.read_bytes()
    try:
        raw = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises plain Exception on files it cannot read
        raise TokenizerError(f"{path} ({len(data)} bytes) cannot be read: {error}") from error
    raw.no_truncation()
    raw.no_padding()
    workers = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
    return Tokenizer(raw, hashlib.sha256(data).hexdigest(), workers)
