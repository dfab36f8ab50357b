"""The judge of the default model's JSON and tool calls, and what is held out for it."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.default_model import corpus, held_out, json_answers, judge, judge_json, tool_use, values


def test_held_out_keys_and_tools_are_not_in_training() -> None:
    trained = {
        name
        for group in (
            json_answers.NAME_KEYS, json_answers.MODULE_KEYS, json_answers.SIGNATURE_KEYS, json_answers.SENTENCE_KEYS,
            json_answers.ANSWER_KEYS, json_answers.COUNT_KEYS, json_answers.NUMBER_KEYS, json_answers.FLAG_KEYS,
            json_answers.KIND_KEYS, json_answers.LIST_KEYS, json_answers.NAME_LIST_KEYS, json_answers.NESTED_KEYS,
            tool_use.NAME_PARAMETERS, tool_use.TEXT_PARAMETERS, values.CHOICES,
            *(kind.names for kind in values.KINDS.values()),
        )
        for name in group
    }  # fmt: skip
    assert {"summary"} == set(held_out.JUDGE_SCHEMAS[0]["properties"])
    keys = {key for schema in held_out.JUDGE_SCHEMAS[1:] for key in schema["properties"]}
    functions = [tool["function"] for tool in held_out.JUDGE_FUNCTION_TOOLS]
    keys |= {key for function in functions for key in function["parameters"]["properties"]}
    assert keys & trained == set()
    nouns = {*tool_use.LOOKUP_NOUNS, *tool_use.TELL_NOUNS, *tool_use.NOUNS}
    assert [function["name"] for function in functions if function["name"].split("_")[-1] in nouns] == []
    cities = {call["city"] for _, _, _, call in held_out.JUDGE_CALLS if "city" in call}
    assert len(cities) == 3
    assert cities & set(values.CITIES) == set()


def perfect(body: dict[str, Any], questions: dict[str, judge.Question]) -> dict[str, Any]:
    """Answer every request of the judge as it should be answered."""
    text = body["messages"][0]["content"]
    if body["messages"][-1]["role"] == "tool":
        return {"message": {"content": f"f returned {judge_json.RESULT}."}, "finish_reason": "stop"}
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        value = dict.fromkeys(schema["required"], questions[text].row.sentence)
        return {"message": {"content": json.dumps(value)}, "finish_reason": "stop"}
    if text in questions:
        (function,) = [tool["function"] for tool in body["tools"]]
        name, arguments = (
            function["name"],
            dict.fromkeys(function["parameters"]["required"], questions[text].row.answer),
        )
    else:
        ((name, arguments),) = [(call[2], call[3]) for call in held_out.JUDGE_CALLS if call[1] == text]
    call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}


def test_judge_counts_complete_and_right_outputs() -> None:
    drawn = judge.draw_named(corpus.load())
    questions = {question.text: question for question in drawn}
    good = judge_json.summary(list(judge_json.outcomes(lambda body: perfect(body, questions), drawn)))
    assert good["reached"]
    assert good["summary"] == good["schemas"] == good["forced"] == {"asked": 40, "complete": 40, "right": 40}
    num_calls = len(held_out.JUDGE_CALLS)
    expected = {"asked": num_calls, "complete": num_calls, "right": num_calls}
    assert good["required"] == good["auto"] == good["result"] == expected

    def cut(_: dict[str, Any]) -> dict[str, Any]:
        return {"message": {"content": '{"summary": "and so'}, "finish_reason": "length"}

    bad = judge_json.summary(list(judge_json.outcomes(cut, drawn)))
    assert (bad["complete"], bad["reached"]) == (0, False)


def test_judge_sends_closed_schemas_without_a_length() -> None:
    sent: list[dict[str, Any]] = []

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        sent.append(body)
        return {"message": {"content": "{}"}, "finish_reason": "stop"}

    question = judge.draw_named(corpus.load())[0]
    for schema in held_out.JUDGE_SCHEMAS:
        outcome = judge_json.schema_outcome(ask, "schemas", question, schema)
        assert (outcome.complete, outcome.right) == (False, False)
    assert "maxLength" not in json.dumps(sent)
    objects = json.dumps(sent).count('"type": "object"')
    assert objects == json.dumps(sent).count('"additionalProperties": false') == len(held_out.JUDGE_SCHEMAS) + 2
