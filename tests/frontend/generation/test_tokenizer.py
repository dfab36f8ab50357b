"""Loading of a tokenizer, encoding and decoding."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.frontend.generation.tokenizer import SHORT_TEXT_CHARS, Tokenizer, TokenizerError, load_tokenizer
from tests.fakes.tokenizer import BEGIN, byte_level_tokenizer, write_tokenizer


def test_the_fingerprint_is_the_hash_of_the_file(tmp_path: Path) -> None:
    fingerprint = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (
        tokenizer.fingerprint == fingerprint == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    )
    tokenizer.close()


def test_short_and_long_texts_encode_alike(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("one two", "one two " * SHORT_TEXT_CHARS):
        assert asyncio.run(tokenizer.encode(text)) == byte_level_tokenizer().encode(text).ids
        assert tokenizer.decode(asyncio.run(tokenizer.encode(text))) == text
    tokenizer.close()


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_a_long_text_does_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    begun = threading.Event()
    for name in ("_encode", "decode"):
        work = getattr(Tokenizer, name)

        def spied(*arguments: object, work: Callable[..., object] = work) -> object:
            begun.set()
            return work(*arguments)

        monkeypatch.setattr(Tokenizer, name, spied)

    async def turns() -> int:
        begun.clear()
        worker: asyncio.Future[object] = asyncio.ensure_future(
            tokenizer.encode("one two " * 50_000) if way == "encode" else tokenizer.decode_many([9] * 1_000_000, True)
        )
        count = 0
        while not worker.done():
            await asyncio.sleep(0.001)
            count += begun.is_set()
        await worker
        return count

    # On a busy machine the loop may have few turns by chance; blocked it has none, however often it is tried.
    assert any(asyncio.run(turns()) > 10 for _ in range(10))
    tokenizer.close()


def test_the_begin_token_comes_from_the_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, with_begin=True)
    tokenizer = load_tokenizer(tmp_path)
    begin = byte_level_tokenizer().token_to_id(BEGIN)
    assert asyncio.run(tokenizer.encode("")) == [begin]
    assert asyncio.run(tokenizer.encode("one"))[0] == begin
    tokenizer.close()


def test_a_missing_or_broken_file_is_a_tokenizer_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"\b1\b"):
        load_tokenizer(tmp_path)
