"""Hundreds of malformed bodies: each gets its 4xx in the format of its API, and none leaves anything open."""

import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct, structs

from tandem.frontend.api.chat_completions import request as chat_completions
from tandem.frontend.api.completions import request as completions
from tandem.frontend.api.messages import request as messages
from tandem.frontend.api.messages.errors import anthropic_status
from tandem.frontend.api.request_scope import ANTHROPIC_PREFIX
from tandem.frontend.api.responses import request as responses
from tandem.frontend.api.tokenize import DETOKENIZE, TOKENIZE
from tandem.frontend.config import ChatOptions, FrontendConfig
from tests.fakes.engine import FakeEngine
from tests.frontend.api.test_errors import error_of
from tests.frontend.conftest import RunningServer, get, until

MESSAGES = [{"role": "user", "content": "one two"}]
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake-model", "prompt": "one two", "max_tokens": 4},
    "/v1/chat/completions": {"model": "fake-model", "messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"model": "fake-model", "input": "one two", "max_output_tokens": 4},
    "/v1/messages": {"model": "fake-model", "messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "fake-model", "messages": MESSAGES},
    "/tokenize": {"model": "fake-model", "prompt": "one two"},
    "/detokenize": {"model": "fake-model", "tokens": [5, 6]},
}
SCHEMAS = {
    "/v1/completions": completions.BODY.schema(),
    "/v1/chat/completions": chat_completions.BODY.schema(),
    "/v1/responses": responses.BODY.schema(),
    "/v1/messages": messages.BODY.schema(),
    "/v1/messages/count_tokens": messages.COUNT_BODY.schema(),
    "/tokenize": TOKENIZE["anyOf"][0],
    "/detokenize": DETOKENIZE,
}
ANYTHING = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Fields that accept any JSON value."""
SAMPLES: dict[str, list[Any]] = {
    "string": ["text"],
    "integer": [3, -7, 10**30],
    "number": [0.5, 1e300],
    "boolean": [True],
    "array": [[], [[]], [{}], [None], ["text", 3], [[[[]]]]],
    "object": [{}, {"a": 1}, {"type": "nothing"}],
}
DEEP = 5000
IGNORED = {
    ("/v1/completions", "stream_options"),
    ("/v1/chat/completions", "messages[0].more"),
    ("/v1/chat/completions", "max_tokens"),
    ("/v1/responses", "tools[0].type"),
    ("/v1/responses", "text.format.schema"),
}
"""Contradictions, by path and field, that are ignored unless unknown fields are refused."""


class Case(Struct, frozen=True):
    """One body with its allowed statuses, and the field at fault if there is one."""

    name: str
    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)
    field: str | None = None
    headers: dict[str, str] = {}
    strict: bool = False
    """True if the body is accepted unless unknown fields are refused."""


def kinds(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema accepts; all of them if it does not say."""
    if "type" in schema:
        given = schema["type"]
        return set(given) if isinstance(given, list) else {given}
    if "anyOf" in schema:
        return set().union(*(kinds(part) for part in schema["anyOf"]))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return {*SAMPLES, "null"}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {names.get(type(value), "null") for value in values}


def body(path: str, **fields: Any) -> bytes:
    return json.dumps({**GOOD[path], **fields}).encode()


def wrong_types(path: str, every_sample: bool) -> Iterator[Case]:
    """Yield every field with a sample of every type that it does not accept, or with every sample."""
    for number, (field, schema) in enumerate(SCHEMAS[path]["properties"].items()):
        if field in ANYTHING:
            continue
        taken = kinds(schema)
        taken |= {"integer"} if "number" in taken else set()
        for kind, values in SAMPLES.items():
            if kind not in taken:
                for value in values if every_sample else [values[number % len(values)]]:
                    yield Case(f"{field}={kind}", path, body(path, **{field: value}), (400,), field)


def out_of_range(path: str) -> Iterator[Case]:
    """Yield numbers out of bounds, lists and texts that are too long, and values that are not allowed."""
    for field, schema in SCHEMAS[path]["properties"].items():
        values: list[Any] = []
        if "minimum" in schema:
            values += [schema["minimum"] - 1, -(10**18)]
        if "exclusiveMinimum" in schema:
            values += [schema["exclusiveMinimum"], -0.1]
        if "maximum" in schema:
            values += [schema["maximum"] + 1, 10**30]
        if "enum" in schema:
            values += ["none of these"]
        for part in (schema, *schema.get("anyOf", ())):
            if "maxItems" in part and part["maxItems"] < 5000:
                values.append(["x"] * (part["maxItems"] + 1))
            if "maxLength" in part and part["maxLength"] < 2**20:
                values.append("x" * (part["maxLength"] + 1))
        for value in values:
            yield Case(f"{field}={str(value)[:20]}", path, body(path, **{field: value}), (400,), field)


def broken_json(path: str, rng: random.Random) -> Iterator[Case]:
    """Yield bodies that are truncated, damaged, in another encoding, or not an object."""
    good = body(path)
    for cut in sorted(rng.sample(range(1, len(good)), 8)):
        yield Case(f"cut at {cut}", path, good[:cut])
    for at in sorted(rng.sample(range(1, len(good) - 1), 8)):
        damaged = good[:at] + bytes([rng.choice([0, 0x1F, 0x80, 0xC0, 0xF8, 0xFF])]) + good[at:]
        yield Case(f"damaged at {at}", path, damaged)
    others = ("utf-16", "utf-32", "utf-8-sig")
    yield from (Case(name, path, good.decode().encode(name)) for name in others)
    yield Case("latin-1", path, good.replace(b'"fake-model"', '"grün"'.encode("latin-1")))
    for text in (
        "",
        "[]",
        "null",
        "3",
        '"text"',
        "{}{}",
        "{,}",
        "{'a': 1}",
        "NaN",
        '{"user": NaN}',
        '{"user": 01}',
        "{1: 2}",
    ):
        yield Case(text or "nothing", path, text.encode())
    yield Case("half a character", path, body(path, model="x").replace(b'"x"', b'"\\ud800"'))
    yield Case(
        "a number beyond all floats",
        path,
        good[:-1] + b', "top_p": 1e999}',
        strict="top_p" not in SCHEMAS[path]["properties"],
    )
    yield Case("deep arrays", path, b"[" * DEEP + b"]" * DEEP)
    yield Case("deep objects", path, b'{"a":' * DEEP + b"1" + b"}" * DEEP, (400,))
    for field in GOOD[path]:
        deep = good[:-1] + b', "%b": ' % field.encode() + b"[" * DEEP + b"]" * DEEP + b"}"
        yield Case(f"deep {field}", path, deep, (400,))
    yield Case("unknown field", path, body(path, surprise=1), (400,), "surprise", strict=True)


def wrong_requests(path: str) -> Iterator[Case]:
    """Yield valid bodies with wrong headers, or without a required field."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", "json"):
        yield Case(kind, path, body(path), (415,), headers={"content-type": kind})
    charset = {"content-type": "application/json; charset=iso-8859-1"}
    yield Case("charset", path, body(path), (415,), headers=charset)
    yield Case("gzip", path, gzip.compress(body(path)), (415,), headers={"content-encoding": "gzip"})
    yield Case("another model", path, body(path, model="another"), (404,), "model")
    yield Case("too large", path, b" " * 300_000, (413,))
    for field in SCHEMAS[path]["required"]:
        rest = {name: value for name, value in GOOD[path].items() if name != field}
        yield Case(f"no {field}", path, json.dumps(rest).encode(), (400,), field)
        yield Case(f"null {field}", path, body(path, **{field: None}), (400,), field)


def contradiction(path: str, fields: dict[str, Any], field: str) -> Case:
    return Case(str(fields)[:40], path, body(path, **fields), (400,), field, strict=(path, field) in IGNORED)


def contradictions() -> Iterator[Case]:
    """Yield fields that are valid alone but not together or not with this model."""
    path = "/v1/completions"
    for fields, field in (
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"response_format": {"type": "json_object"}, "grammar": "start: /a/"}, "grammar"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [5] * 3000}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"stop": ["a", 3]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start"}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ):
        yield contradiction(path, fields, field)
    path = "/v1/chat/completions"
    tool = {"type": "function", "function": {"name": "f"}}
    for chat_fields, field in (
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "more": 1}]}, "messages[0].more"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool, tool]}, "tools[1].function.name"),
        ({"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
    ):
        yield contradiction(path, chat_fields, field)
    path = "/v1/responses"
    schema = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    for response_fields, field in (
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": schema}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "choice": ["a"]}, "choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "a " * 5000}, "input"),
    ):
        yield contradiction(path, response_fields, field)


def cases(every_sample: bool = False) -> list[Case]:
    rng = random.Random(20)
    found = [
        case
        for path in GOOD
        for case in (
            *wrong_types(path, every_sample),
            *out_of_range(path),
            *broken_json(path, rng),
            *wrong_requests(path),
        )
    ]
    return [*found, *contradictions()]


@pytest.fixture
def chatting(engine: FakeEngine, config: FrontendConfig, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server that accepts small bodies, refuses unknown fields, and whose model can chat."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    engine.start()
    settings = structs.replace(config, chat=ChatOptions(template=template), max_body=250_000, unknown_fields="refuse")
    running = RunningServer(settings).start().ready()
    yield running
    running.stop()


def value_of(metrics: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def check_alive(server: RunningServer, engine: FakeEngine, client: httpx.Client) -> None:
    """Check that a valid request of each kind is answered, and that nothing stays open."""
    for path, fields in GOOD.items():
        assert client.post(server.url + path, json=fields).status_code == 200, path
    service = server.server._service
    until(lambda: engine.num_running == 0)
    assert (service.client.num_open, service.client.queued_tokens, service.body_budget.used) == (0, 0, 0)
    assert value_of(get(server.url + "/metrics").text, "tandem_frontend_num_requests_running") == 0


def is_refused(case: Case, response: httpx.Response) -> bool:
    """Return True for an error with the status of a case, in the format of its API, that names the field at fault."""
    if response.status_code < 400:
        return False
    if not case.path.startswith(ANTHROPIC_PREFIX):
        named = case.field is None or str(error_of(response)["param"]).startswith(case.field)
        return response.status_code in case.statuses and named
    body = response.json()
    assert (set(body), set(body["error"])) == ({"type", "error", "request_id"}, {"type", "message"})
    statuses = {anthropic_status(status, None) for status in case.statuses}
    return response.status_code in statuses and (case.field or "") in body["error"]["message"]


@pytest.mark.parametrize("every_sample", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_malformed_body_is_rejected_with_4xx(
    every_sample: bool, chatting: RunningServer, engine: FakeEngine
) -> None:
    found = cases(every_sample)
    assert len(found) > 500, len(found)
    wrong: list[str] = []
    with httpx.Client(timeout=30) as client:
        check_alive(chatting, engine, client)
        submitted = len(engine.submits)
        for case in found:
            headers = {"content-type": "application/json", **case.headers}
            response = client.post(chatting.url + case.path, content=case.content, headers=headers)
            if not is_refused(case, response):
                wrong.append(f"{case.path} {case.name}: {response.status_code} {response.text[:200]}")
        assert not wrong, "\n".join(wrong)
        assert len(engine.submits) == submitted
        check_alive(chatting, engine, client)


def test_malformed_cases_are_almost_all_distinct() -> None:
    keys = [(case.path, case.content, *itertools.chain(*case.headers.items())) for case in cases(every_sample=True)]
    assert len(set(keys)) > 0.95 * len(keys)
