"""Log-probabilities in the formats of completions and chats, and the choices that `best_of` keeps."""

import json

import msgspec
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from tandem.frontend.api.logprobs import chat_logprobs, completion_logprobs, keep_best
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.scored_tokens import LOWEST, ScoredToken

HALF, FACE = "🙂".encode()[:2], "🙂".encode()
TOKENS = [
    ScoredToken(b"<s>", None, [], 0),
    ScoredToken(b"a", -0.5, [(b"a", -0.5), (b"b", -1.0)], 0),
    ScoredToken(HALF, -3.0, [(b"x", -0.25), (FACE, LOWEST)], 1),
    ScoredToken(FACE[2:], -0.125, [], 1),
]


def test_completion_logprobs_are_parallel_lists() -> None:
    assert completion_logprobs(TOKENS) == {
        "tokens": ["<s>", "a", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82"],
        "token_logprobs": [None, -0.5, -3.0, -0.125],
        "top_logprobs": [
            None,
            {"a": -0.5, "b": -1.0},
            {"x": -0.25, "🙂": LOWEST, "bytes:\\xf0\\x9f": -3.0},
            {"bytes:\\x99\\x82": -0.125},
        ],
        "text_offset": [0, 0, 1, 1],
    }


def test_completion_logprobs_merge_tokens_of_the_same_text() -> None:
    token = ScoredToken(b"a", -4.0, [(b"a", -1.0), (b"a", -2.0)], 0)
    assert completion_logprobs([token])["top_logprobs"] == [{"a": -1.0}]


def test_chat_logprobs_are_objects_with_bytes() -> None:
    assert chat_logprobs(TOKENS[1:3]) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.0, "bytes": [98]},
                ],
            },
            {
                "token": "\\xf0\\x9f",
                "logprob": -3.0,
                "bytes": [240, 159],
                "top_logprobs": [
                    {"token": "x", "logprob": -0.25, "bytes": [120]},
                    {"token": "🙂", "logprob": LOWEST, "bytes": [240, 159, 153, 130]},
                ],
            },
        ],
        "refusal": None,
    }


def test_logprobs_match_the_official_types() -> None:
    completion = Logprobs.model_validate(json.loads(msgspec.json.encode(completion_logprobs(TOKENS[1:]))))
    assert completion.text_offset == [0, 1, 1]
    chat = ChoiceLogprobs.model_validate(json.loads(msgspec.json.encode(chat_logprobs(TOKENS[1:]))))
    assert chat.content is not None
    assert bytes(chat.content[1].bytes or ()) == HALF


def test_keep_best_ranks_the_choices_of_each_prompt() -> None:
    means = [-3.0, -1.0, -2.0, -9.0, None, -8.0]
    choices = [ChoiceDelta(index, str(index), [], "stop", mean_logprob=mean) for index, mean in enumerate(means)]
    assert [piece.index for piece in keep_best(choices, 3, 2)] == [1, 2, 4, 5]
    assert [piece.index for piece in keep_best(choices, 3, 3)] == [1, 2, 0, 4, 5, 3]
