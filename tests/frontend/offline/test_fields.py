"""Keywords of offline calls, right and wrong."""

import asyncio
import re
from typing import Any

import numpy as np
import pydantic
import pytest

from tandem.frontend.offline.async_llm import AsyncLLM
from tandem.frontend.offline.fields import (
    chat_fields,
    completion_fields,
    continued_prompts,
    conversation_batch,
    engine_options,
    prompt_batch,
    refuse_parameters,
    verify_fields,
)
from tandem.frontend.offline.llm import LLM


class SamplingParams:
    """Such an object as other engines take."""


class Model(pydantic.BaseModel):
    """What a caller may give instead of its schema."""


TALK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"temprature": 1}, r"'temprature'.* 'temperature'\?"),
        ({"max_token": 1}, r"'max_token'.* 'max_tokens'\?"),
        ({"json_schemas": {}}, r"'json_schemas'.* 'json_schema'\?"),
        ({"echo_x_y": 1}, "'echo_x_y'"),
        ({"stream": True}, r"'stream'.* stream\(\) or stream_chat\b"),
        ({"echo": True}, "give prompt_logprobs=N"),
        ({"use_tqdm": False}, "give progress=False"),
        ({"sampling_params": 1}, "'sampling_params'.* keywords"),
        ({"model": "m"}, "'model'.* constructor"),
        ({"json_schema": Model}, r"give Model\.model_json_schema\(\)"),
        ({"json_schema": {}, "response_format": {"type": "text"}}, "'json_schema' .*'response_format'"),
    ],
)
def test_a_name_that_is_no_keyword_is_a_type_error(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        completion_fields(given)
    with pytest.raises(TypeError, match=reason):
        chat_fields(given)


def test_a_field_of_another_call_names_that_call() -> None:
    for check, name, stream, call in (
        (completion_fields, "prediction", False, "chat()"),
        (completion_fields, "tools", True, "stream_chat()"),
        (chat_fields, "suffix", False, "generate()"),
        (chat_fields, "suffix", True, "stream()"),
    ):
        with pytest.raises(TypeError) as refused:
            check({name: None}, stream)
        message = str(refused.value)
        assert repr(name) in message and message.endswith(f" {call}") and "did you mean" not in message


def test_json_schema_stands_for_a_response_format() -> None:
    schema = {"type": "object"}
    for fields in (completion_fields({"json_schema": schema}), chat_fields({"json_schema": schema})):
        assert fields.body["response_format"]["json_schema"]["schema"] == schema
        assert fields.body["response_format"]["type"] == "json_schema"
        assert "json_schema" not in fields.body


def test_prompt_logprobs_become_an_echo() -> None:
    fields = completion_fields({"prompt_logprobs": 2})
    assert (fields.prompt_logprobs, fields.with_logprobs, fields.body["logprobs"]) == (2, False, 0)
    assert fields.body["echo"] is True
    both = completion_fields({"prompt_logprobs": 0, "logprobs": 3})
    assert (both.prompt_logprobs, both.with_logprobs, both.body["logprobs"]) == (0, True, 3)
    for wrong in (-1, 1000, True, "1"):
        with pytest.raises(ValueError, match="'prompt_logprobs'"):
            completion_fields({"prompt_logprobs": wrong})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], "a", (3,)], [[1, 2], "a", [3]]),
        ([], []),
        (np.array([1, 2]), [[1, 2]]),
        ([np.array([1, 2])], [[1, 2]]),
    ],
)
def test_prompts_are_texts_or_token_ids(given: Any, prompts: list[Any]) -> None:
    assert prompt_batch(given) == prompts


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([["a", "b"]], r"prompt 0\b.* list with a str\b"),
        ([1, "a"], r"the prompt\b.* list with a str\b"),
        (["a", [1, 2.0]], r"prompt 1\b.* list with a float\b"),
        ([[True]], "a bool"),
        ([{"prompt": "a"}], "prompt 0 .*list.* type dict"),
        (3, "prompts must .*list.* type int"),
        ([np.int64(3)], "prompt 0 must .*list.* type int64"),
    ],
)
def test_other_prompts_are_a_type_error(given: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        prompt_batch(given)


def test_conversations_are_lists_of_messages() -> None:
    assert conversation_batch(TALK) == [TALK]
    assert conversation_batch([TALK, TALK]) == [TALK, TALK]
    assert conversation_batch([]) == []
    with pytest.raises(TypeError):
        conversation_batch("hello")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\b1\b.*\bstr\b"):
        conversation_batch([TALK, "hello"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "given",
    [
        {"draft_model": "small", "spec_length": 3},
        {"speculate": "model:small", "speculate_tokens": 3},
        {"speculative_config": {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}},
    ],
)
def test_a_draft_model_has_short_names_and_those_of_vllm(given: dict[str, Any]) -> None:
    options = engine_options("m", given)
    assert (options.speculate, options.speculate_tokens, options.draft_model) == ("model:small", 3, "small")


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"draft_model": "x", "speculate": "ngram"}, TypeError, "draft_model.*speculate"),
        ({"spec_length": 3, "speculate_tokens": 2}, TypeError, "spec_length.*speculate_tokens"),
        ({"speculative_config": {"method": "mtp"}}, ValueError, "speculative_config.*mtp"),
        ({"speculative_config": {"method": "ngram"}, "speculate": "off"}, TypeError, "speculate"),
        ({"speculate": "model:"}, ValueError, "speculate"),
        ({"speculate": "eagle"}, ValueError, "speculate"),
        ({"draft_model": "x", "spec_length": 9}, ValueError, "--speculate-tokens 9: .*1 to 7"),
        ({"speculate": "ngram", "speculate_tokens": 0}, ValueError, "--speculate-tokens 0: .*1 to 7"),
    ],
)
def test_options_of_drafts_that_contradict_are_refused(
    given: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        engine_options("m", given)


def test_an_unknown_option_names_the_nearest_one() -> None:
    assert engine_options("m", {"max_rows": 3}).max_rows == 3
    for name, near in (
        ("max_model_len", "max_len"),
        ("gpu_memory_utilization", "gpu_memory"),
        ("page_sizes", "page_size"),
        ("quantization", "quantize"),
    ):
        with pytest.raises(TypeError, match=f"{name!r}.*{near!r}"):
            engine_options(None, {name: 1})
    for name in ("tensor_parallel_size", "seed", "enable_sleep_mode", "trust_remote_code"):
        with pytest.raises(TypeError, match=f"{name!r}") as refused:
            engine_options(None, {name: 1})
        assert "did you mean" not in str(refused.value) and "served_model_name" not in str(refused.value)
    with pytest.raises(TypeError, match=r"'xyzzy'.*\bserved_model_name\b"):
        engine_options(None, {"xyzzy": 1})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("kv_dtype", "int8", r"kv_dtype='int8': .*'int8' \(.*fp8"),
        ("quantize", "awq", r"quantize='awq': .*'awq' \(.*fp8"),
        ("prefill_chunk", "on", "prefill_chunk='on': "),
        ("max_rows", "many", "max_rows='many': .*int"),
        ("kv_memory", "4GX", "kv_memory='4GX': .*bytes"),
    ],
)
def test_a_value_that_no_flag_takes_is_refused_by_its_name(name: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine_options(None, {name: value})


@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "fp8_e4m3"}, {"max_itl": 7.5, "max_rows": 4}, {"prefill_chunk": "off"}, {"gpu_memory": 0.5}],
    ids=str,
)
def test_values_are_kept_as_they_are_given(options: dict[str, object]) -> None:
    settings = engine_options("folder", options)
    assert {name: getattr(settings, name) for name in options} == options


@pytest.mark.parametrize(
    ("given", "call"),
    [
        (SamplingParams(), "llm.generate(prompts, temperature=0, max_tokens=64)"),
        ({"temperature": 0.5, "stop": ["x"]}, "llm.generate(prompts, temperature=0.5, stop=['x'])"),
    ],
)
def test_sampling_parameters_in_an_object_are_answered_with_the_call_that_was_meant(given: object, call: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{type(given).__name__};.* {re.escape(call)}$"):
        refuse_parameters(given, "llm.generate(prompts")
    refuse_parameters(None, "llm.generate(prompts")


def test_every_batch_call_takes_the_place_of_sampling_parameters() -> None:
    for call, first in (("generate", "x"), ("chat", TALK)):
        closed = LLM.__new__(LLM)
        with pytest.raises(TypeError, match=rf"\bllm\.{call}\("):
            getattr(closed, call)(first, SamplingParams())
        waiting = getattr(AsyncLLM.__new__(AsyncLLM), call)(first, SamplingParams())
        with pytest.raises(TypeError, match=rf"\bawait\sllm\.{call}\("):
            asyncio.run(waiting)


def test_prompts_and_continuations_come_in_pairs() -> None:
    assert continued_prompts("a", "b") == [("a", "b")]
    assert continued_prompts([1, 2], [3]) == [([1, 2], [3])]
    assert continued_prompts(["a", [1]], [[2], "b"]) == [("a", [2]), ([1], "b")]
    with pytest.raises(ValueError, match=r"\b2\b.*\b3\b"):
        continued_prompts(["a", "b"], ["a", "b", "c"])
    with pytest.raises(TypeError, match=r"continuation 1\b"):
        continued_prompts(["a", "b"], ["a", {}])


@pytest.mark.parametrize("logprobs", [-1, 21, True, 1.0, None])
def test_number_of_alternatives_of_verified_tokens_is_checked(logprobs: Any) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        verify_fields(logprobs, False, {})


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "n", "prompt_logprobs", "stop"])
def test_fields_of_a_generation_are_not_fields_of_a_verification(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        verify_fields(0, False, {name: 1})


def test_fields_of_a_verification() -> None:
    fields = verify_fields(5, True, {"lora": "an adapter", "session_id": "s", "cache_salt": "x", "priority": 3})
    assert (fields.request.prompt_logprobs, fields.logits) == (5, True)
    assert fields.request.body.items() >= {"model": "an adapter", "max_tokens": 0, "priority": 3}.items()
