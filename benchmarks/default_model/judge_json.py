"""Judge of the default model's JSON and tool calls, which asks a running server.

    tandem serve &
    python -m benchmarks.default_model.judge_json --url http://127.0.0.1:8000

No schema has a `maxLength`, so an output is complete only if the model ends every string by itself. It has 128 tokens;
decoding is greedy. The sets:

    summary    the judge's questions about functions, with the schema of README's example
    schemas    the same questions, with schemas of keys that training does not use
    forced     the same questions, with a forced call of a tool that training does not use
    required   other requests, with `tool_choice` "required"
    auto       the same requests, where the model decides by itself to call a tool
    result     the same conversations after the tool's result: the answer must be text and contain the result

An output is right if it holds half of the content words of the docstring's sentence, if it names the function where
only a name was asked for, or if the call and its arguments are the expected ones. Needs 95 % of all outputs to be
complete and valid.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.default_model.corpus import load
from benchmarks.default_model.held_out import JUDGE_CALLS, JUDGE_FUNCTION_TOOLS, JUDGE_SCHEMAS
from benchmarks.default_model.judge import Question, draw_named, served_model, share_held

MAX_TOKENS = 128
NEEDED = 0.95
RESULT = "42 parrots"

# The first choice of the server's reply to a chat with these fields.
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The judge's result for one output: whether it is complete and valid, and whether its content is right."""

    kind: str
    question: str
    output: str
    complete: bool
    right: bool


def server_asker(url: str, model: str) -> Ask:
    """Return a function that sends a chat to an OpenAI-compatible server."""

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS} | fields
        request = urllib.request.Request(
            url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choice: dict[str, Any] = json.load(reply)["choices"][0]
        return choice

    return ask


def parsed(text: str | None) -> Any:
    """Parse JSON; None if the text is not valid JSON."""
    try:
        return json.loads(text or "")
    except ValueError:
        return None


def has_required(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value is an object with the required keys of its schema."""
    return isinstance(value, dict) and set(schema.get("required", ())) <= value.keys()


def about(question: Question, text: str) -> bool:
    """Return whether a text describes the function, or at least names it."""
    return share_held(text, question.row.sentence) >= 0.5 or question.row.dotted in text


def schema_outcome(ask: Ask, kind: str, question: Question, schema: dict[str, Any]) -> Outcome:
    """Ask a question about a function for an object of this schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": closed(schema)}}
    choice = ask({"messages": [_user(question.text)], "response_format": wanted})
    content = choice["message"]["content"] or ""
    complete = choice["finish_reason"] == "stop" and has_required(parsed(content), schema)
    return Outcome(kind, question.text, content, complete, complete and about(question, content))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema with all its objects closed, as strict schemas are."""
    copy = {key: closed(value) if isinstance(value, dict) else value for key, value in schema.items()}
    return copy | {"additionalProperties": False} if schema.get("type") == "object" else copy


def forced_outcome(ask: Ask, question: Question, tool: dict[str, Any]) -> Outcome:
    """Ask a question about a function with a forced call of the tool."""
    choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
    reply = ask({"messages": [_user(question.text)], "tools": [tool], "tool_choice": choice})
    _, arguments, written = _call(reply)
    complete = reply["finish_reason"] != "length" and has_required(arguments, tool["function"]["parameters"])
    return Outcome("forced", question.text, written, complete, complete and about(question, written))


def call_outcomes(
    ask: Ask, tools: Sequence[dict[str, Any]], text: str, name: str, arguments: dict[str, Any]
) -> Iterator[Outcome]:
    """Ask for a call that is required, for one by choice, and for the answer after the call's result."""
    asked = {"messages": [_user(text)], "tools": list(tools)}
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for mode in ("required", "auto"):
        reply = ask({**asked, "tool_choice": mode})
        called, given, written = _call(reply)
        complete = reply["finish_reason"] != "length" and has_required(given, parameters.get(called, {}))
        yield Outcome(mode, text, f"{called} {written}", complete, (called, given) == (name, arguments))
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    turns = [
        _user(text),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
    ]
    reply = ask({**asked, "messages": turns})
    content = reply["message"]["content"] or ""
    yield Outcome("result", text, content or _call(reply)[2], reply["finish_reason"] == "stop", RESULT in content)


def outcomes(ask: Ask, questions: Sequence[Question]) -> Iterator[Outcome]:
    """Yield the result of every request of every set."""
    readme, *others = JUDGE_SCHEMAS
    for number, question in enumerate(questions):
        yield schema_outcome(ask, "summary", question, readme)
        yield schema_outcome(ask, "schemas", question, others[number % len(others)])
        yield forced_outcome(ask, question, JUDGE_FUNCTION_TOOLS[number % len(JUDGE_FUNCTION_TOOLS)])
    for tools, text, name, arguments in JUDGE_CALLS:
        yield from call_outcomes(ask, tools, text, name, arguments)


def summary(results: Sequence[Outcome]) -> dict[str, Any]:
    """Count the results of each set; return them and whether enough are complete."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"asked": 0, "complete": 0, "right": 0})
    for result in results:
        counts[result.kind]["asked"] += 1
        counts[result.kind]["complete"] += result.complete
        counts[result.kind]["right"] += result.right
    complete = sum(result.complete for result in results) / len(results)
    return {"max_tokens": MAX_TOKENS, **counts, "complete": round(complete, 4), "reached": complete >= NEEDED}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(choice: dict[str, Any]) -> tuple[str, Any, str]:
    """Return the name, the parsed arguments and the written arguments of the only call; empty ones if there is none."""
    calls = choice["message"].get("tool_calls") or []
    if len(calls) != 1:
        return "", None, choice["message"].get("content") or json.dumps(calls)
    function = calls[0]["function"]
    return function["name"], parsed(function["arguments"]), function["arguments"]


def main() -> None:
    """Judge the served model, and print one line per output and the summary.

    The exit status says whether the required share was reached.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a running server")
    parser.add_argument("--name", help="the model name to send to the server")
    arguments = parser.parse_args()
    ask = server_asker(arguments.url, arguments.name or served_model(arguments.url))
    results = []
    for result in outcomes(ask, draw_named(load())):
        marks = f"{'complete' if result.complete else 'CUT     '} {'right' if result.right else 'WRONG'}"
        print(f"{marks} {result.kind:8} {result.question} -> {result.output}", flush=True)
        results.append(result)
    counted = summary(results)
    print(json.dumps(counted))
    raise SystemExit(0 if counted["reached"] else 1)


if __name__ == "__main__":
    main()
