"""The routes `/tokenize` and `/detokenize` over HTTP."""

import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tandem.frontend.generation.admission import MANY_IDS
from tandem.frontend.generation.tokenizer import Tokenizer
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, post
from tests.support.shared_frontend import shared_fixtures

TOKENIZER = byte_level_tokenizer()
TEXT = "the quick brown fox, grüße 🙂"

shared, engine, server = shared_fixtures()


def tokenize(server: RunningServer, **fields: Any) -> httpx.Response:
    return post(server.url + "/tokenize", json=fields)


def detokenize(server: RunningServer, **fields: Any) -> httpx.Response:
    return post(server.url + "/detokenize", json=fields)


@pytest.mark.parametrize("text", ["", TEXT, TEXT * 100])
def test_tokenize_and_detokenize_round_trip_a_text(server: RunningServer, text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    answer = tokenize(server, model="fake-model", prompt=text).json()
    assert answer == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
    assert detokenize(server, tokens=ids).json() == {"prompt": text}


def test_tokenize_returns_token_strings_on_request(server: RunningServer) -> None:
    answer = tokenize(server, prompt="the fox", return_token_strs=True).json()
    assert answer["token_strs"] == TOKENIZER.encode("the fox").tokens
    assert "".join(answer["token_strs"]) == "theĠfox"


def test_many_token_strings_are_looked_up_outside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, threads = Tokenizer.names, []

    def spy(self: Tokenizer, ids: Sequence[int]) -> list[str]:
        threads.append(threading.current_thread().name)
        return names(self, ids)

    monkeypatch.setattr(Tokenizer, "names", spy)
    for text in ("the fox", "the fox " * MANY_IDS):
        answer = tokenize(server, prompt=text, return_token_strs=True).json()
        assert answer["count"] == len(answer["token_strs"]) == len(TOKENIZER.encode(text).ids)
    assert threads[0] == "server"
    assert threads[1].startswith("parse")


def test_detokenize_keeps_special_tokens_unless_skipped(server: RunningServer) -> None:
    ids = [0, *TOKENIZER.encode("fox").ids, 1]
    assert detokenize(server, tokens=ids).json() == {"prompt": "<|begin|>fox<|end|>"}
    assert detokenize(server, tokens=ids, skip_special_tokens=True).json() == {"prompt": "fox"}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": None}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "model": 3}, 400, "model"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a" * (4 * 2**20 + 1)}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [420]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**21 + 2)}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_tokenize_and_detokenize_reject_invalid_fields_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    response = post(server.url + path, json=fields)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
