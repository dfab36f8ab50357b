"""Text to token ids and back, from the model folder's `tokenizer.json` alone."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from frontend.detokenizer import Detokenizer

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

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return Detokenizer(self._raw, self._anchor)

    async def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with whatever the tokenizer's own template adds (such as a begin token)."""
        if len(text) <= SHORT_TEXT_CHARS:
            return self._encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._encode, text)

    def fewest(self, text: str) -> int:
        """A number of tokens that the text has at least, for nothing: refuses monsters without encoding them."""
        return len(text) // self._longest

    def decode(self, ids: Sequence[int]) -> str:
        """Text of these ids, without special tokens."""
        return self._raw.decode(list(ids), skip_special_tokens=True)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._raw.encode(text).ids
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
