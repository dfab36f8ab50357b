"""Parsing of the body of a completion, field by field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.api.completions.request import CompletionRequest, parse_completion
from tandem.frontend.errors import ApiError
from tandem.frontend.request import field_types
from tandem.frontend.request.field_types import MAX_FIELD_BYTES
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import MAX_STOP_CHARS, OPTION_FIELDS
from tandem.protocol.params import SamplingParams
from tests.support.refusals import check_taken_or_refused_by_name, numbers_in, raises_api_error, refusal

BASE = {"model": "m", "prompt": "p"}


def parse(**fields: Any) -> CompletionRequest:
    return parse_completion(msgspec.json.encode({**BASE, **fields}), IgnoredFields(refuse=True))


def refused(**fields: Any) -> ApiError:
    return refusal(parse, **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "somebody"), ("metadata", {"a": "b"}), ("safety_identifier", "x"), ("prompt_cache_key", "x"),
        ("store", False), ("store", None), ("service_tier", "auto"), ("service_tier", "default"), ("suffix", ""),
        ("suffix", None), ("logprobs", None), ("best_of", 1), ("best_of", None), ("response_format", None),
        ("skip_special_tokens", True), ("include_stop_str_in_output", False), ("stream_options", None),
        ("top_k", None), ("temperature", None), ("n", None), ("max_tokens", None), ("stop", None),
        ("stop", []), ("logit_bias", {}), ("logit_bias", None), ("seed", None), ("length_penalty", 1.0),
        ("priority", 0), ("priority", None), ("session_id", None), ("cache_salt", None),
    ],
)  # fmt: skip
def test_completion_accepts_values_that_change_nothing(name: str, value: Any) -> None:
    assert parse(**{name: value}) == parse()


def test_top_k_of_minus_one_keeps_every_token() -> None:
    options = parse(top_k=-1).options
    assert options.sampling == parse().options.sampling
    assert options.given_sampling == {"top_k"}, "the default of the model is not used"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True), ("service_tier", "flex"), ("suffix", "x"), ("logprobs", 21), ("logprobs", -1),
        ("best_of", 129), ("include_usage", True), ("priority", 101), ("priority", -101),
        ("session_id", ""), ("session_id", "x" * 257), ("session_id", "é" * 129), ("cache_salt", ""),
        ("cache_salt", "é" * 129),
        ("tools", []), ("messages", None), ("Prompt", "x"),
        ("temperature", -0.1), ("temperature", 2.1), ("top_p", -0.1), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5),
        ("repetition_penalty", 0), ("repetition_penalty", 11), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("seed", -2), ("seed", 2**63), ("max_tokens", 0), ("max_tokens", -2), ("max_tokens", 2**31), ("min_tokens", 17),
        ("min_tokens", -1), ("n", 0), ("n", 129), ("stop", ["a"] * 257),
        ("stop", "x" * 1025), ("stop_token_ids", [1] * 65), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {str(i): 1 for i in range(513)}), ("prompt", ["p"] * 257),
        ("stream_options", {"include_usage": True}), ("length_penalty", 2),
    ],
)  # fmt: skip
def test_completion_rejects_unsupported_values_with_400_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.status == 400
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1), ("prompt", 1), ("prompt", None), ("prompt", {}), ("prompt", [1, "a"]),
        ("prompt", ["a", 1]), ("prompt", [[1], "a"]), ("prompt", [[1, "a"]]), ("prompt", [True]), ("prompt", [1.5]),
        ("prompt", [None]), ("max_tokens", "16"), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", "hot"),
        ("temperature", True), ("top_p", []), ("stream", 1), ("stream", "true"), ("echo", "x"), ("n", "2"),
        ("stop", 1), ("stop", [1]), ("stop_token_ids", 1), ("stop_token_ids", ["1"]), ("stop_token_ids", [True]),
        ("logit_bias", []), ("logit_bias", {"1": "x"}), ("logit_bias", {"1": True}), ("seed", 1.5),
        ("ignore_eos", 0), ("return_token_ids", "no"), ("stream_options", 3), ("priority", "high"), ("priority", 1.5),
        ("session_id", 1),        ("cache_salt", ["x"]),
    ],
)  # fmt: skip
def test_completion_rejects_wrong_types_with_400_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.status == 400
    assert error.param == name


def test_completion_without_a_required_field_is_rejected() -> None:
    with raises_api_error(400, param="prompt"):
        parse_completion(b'{"model": "m"}', IgnoredFields())


def test_error_message_contains_the_bounds() -> None:
    assert numbers_in(refused(temperature=2.5).message) == [0, 2, 2.5]
    assert numbers_in(refused(n=500).message) == [1, 128, 500]
    assert 256 in numbers_in(refused(prompt=["p"] * 100, n=3).message)


def test_error_message_names_the_element_of_a_wrong_type() -> None:
    assert refused(stop=["a", None]).message.endswith(" 1 is null")
    assert refused(stop_token_ids=[1, "2"]).message.endswith(" 1 is a string")


def test_large_prompts_parse_like_small_ones() -> None:
    ids = [*range(-7, 100_000), 2**40]
    assert parse(prompt=ids).prompts == [ids]
    assert parse(prompt=[ids, [], [1]]).prompts == [ids, [], [1]]
    text = 'a "quoted\\" [1, 2] text\\' * 10_000
    assert parse(prompt=text).prompts == [text]
    assert parse(prompt=[text, "b"] * 128).prompts == [text, "b"] * 128


@pytest.mark.parametrize(
    ("prompt", "status"),
    [
        ([*range(100_000), "a"], 400), ([*range(100_000), [1]], 400), ([*range(100_000), 1.5], 400),
        ([[*range(100_000)], 1], 400), ([[*range(100_000)], {"a": [1]}], 400), ([[*range(100_000), [1]]], 400),
        (["a"] * 100_000, 400), (["\\"] * 100_000, 400), ([[1]] * 100_000, 400), (["a" * 100_000, 1], 400),
    ],
)  # fmt: skip
def test_large_prompts_are_rejected_like_small_ones(prompt: Any, status: int) -> None:
    error = refused(prompt=prompt)
    assert (error.status, error.param) == (status, "prompt")


def test_only_prompt_and_ignored_fields_may_be_large() -> None:
    assert parse(metadata={"a": "b" * MAX_FIELD_BYTES}) == parse()
    error = refused(stop=["b"] * MAX_FIELD_BYTES)
    assert (error.status, error.param) == (400, "stop") and MAX_FIELD_BYTES in numbers_in(error.message)
    stops = ["\U0001f642" * MAX_STOP_CHARS] * 16
    body = json.dumps({**BASE, "stop": stops}).encode()
    assert parse_completion(body, IgnoredFields()).options.stop == tuple(stops)


def test_ignored_fields_are_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    decode = field_types.decode_field
    monkeypatch.setattr(field_types, "decode_field", lambda raw, name: built.append(name) or decode(raw, name))
    parse(metadata=[{}] * 1000, n=1)
    assert "n" in built
    assert "metadata" not in built


def test_stream_options_need_a_stream_and_known_fields() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).options.include_usage
    assert not parse(stream=True, stream_options={"include_obfuscation": True}).options.include_usage
    assert refused(stream=True, stream_options={"include_obfuscation": 1}).status == 400
    assert refused(stream=True, stream_options={"other": 1}).param == "stream_options.other"
    assert refused(stream=True, stream_options={"include_usage": 1}).status == 400


def test_max_tokens_of_zero_needs_echo() -> None:
    assert parse(max_tokens=0, echo=True).options.max_tokens == 0
    assert refused(max_tokens=0).status == 400


def test_best_of_may_equal_n_but_not_be_less() -> None:
    assert parse(n=3, best_of=3) == parse(n=3)
    assert refused(n=3, best_of=2).param == "best_of"


def test_completion_defaults_match_openai() -> None:
    options = parse().options
    assert (options.max_tokens, options.n, options.sampling) == (16, 1, SamplingParams(16))
    assert (options.sampling.temperature, options.sampling.top_p) == (1.0, 1.0)
    assert (options.seed, options.stop, options.stream, parse().echo) == (None, (), False, False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*(field.name for field in OPTION_FIELDS), "prompt", "echo", "suffix", "other"])


@given(st.dictionaries(names, json_values, max_size=4))
def test_completion_accepts_or_rejects_any_json_by_name(fields: dict[str, Any]) -> None:
    check_taken_or_refused_by_name(parse, fields)


@given(st.binary(max_size=40))
def test_completion_rejects_any_bytes_that_are_not_a_request(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_completion(body, IgnoredFields())


def test_completion_reads_scheduling_fields() -> None:
    options = parse(priority=-100, session_id="é" * 128, cache_salt="pepper", n=1, best_of=1).options
    assert (options.priority, options.session_id, options.cache_salt) == (-100, "é" * 128, "pepper")
    assert parse(priority=100, cache_salt="pepper", n=2, prompt=["a", "b"]).options.priority == 100


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("best_of", 2), ("prompt", ["a", "b"])])
def test_session_rejects_more_than_one_sequence(name: str, value: Any) -> None:
    error = refused(session_id="talk", **{name: value})
    assert (error.status, error.param) == (400, name)
    assert "session_id" in error.message
