"""Tools described in the messages: what is said can be parsed as a call, and nothing of the conversation is lost."""

from typing import Any

import pytest

from tandem.frontend.chat import tool_prompt
from tandem.frontend.chat.message import CallArguments, CallStart
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.chat.tool_parser import ToolParser
from tandem.frontend.chat.tool_prompt import with_tools_as_text
from tandem.frontend.request.conversation import Conversation

LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
ADD = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "hi"}


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def adapted(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = (), form: str = "json") -> list[Any]:
    found = with_tools_as_text(Conversation([*messages], tools), FORMATS[form].syntax)
    assert found.tools == ()
    return found.messages


def test_tools_are_described_in_a_system_message_of_their_own() -> None:
    system, user = adapted(USER, tools=(LOOK, ADD))
    assert (system["role"], user) == ("system", USER)
    assert '{"name":"look","description":"Look.","parameters":{"type":"object"}}\n{"name":"add"}' in system["content"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_appended_to_the_system_message(role: str) -> None:
    system, user = adapted({"role": role, "content": "Be short."}, USER, tools=(ADD,))
    assert (system["role"], user) == (role, USER)
    assert system["content"].startswith("Be short.\n\nYou can call")


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    messages = [USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}]
    assert adapted(*messages) == messages


def test_results_that_follow_one_another_share_a_message() -> None:
    results = [{"role": "tool", "content": str(number), "tool_call_id": f"c{number}"} for number in (1, 2)]
    asked = {"role": "assistant", "content": "Well.", "tool_calls": [call("c1", "look", at=1), call("c2", "add")]}
    _, said, result, last = adapted(USER, asked, *results, USER)
    assert said["content"].startswith("Well.\n\n")
    assert "tool_calls" not in said
    assert (result["role"], last) == ("user", USER)
    assert [result["content"].index(text) for text in ("c1:\n1", "c2:\n2")] == sorted(
        result["content"].index(text) for text in ("c1:\n1", "c2:\n2")
    )


def test_thousands_of_results_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined one by one, those of a large body would hold up all streams for half a minute."""
    monkeypatch.setattr(tool_prompt, "_joined", pytest.fail)
    results = [{"role": "tool", "content": "y" * 9, "tool_call_id": f"c{number}"} for number in range(5000)]
    _, result, last = adapted(USER, *results, USER)
    assert (result["content"].count("y" * 9), last) == (5000, USER)


@pytest.mark.parametrize("form", FORMATS)
def test_written_calls_are_those_that_the_parser_reads(form: str) -> None:
    asked = {"role": "assistant", "tool_calls": [call("c1", "look", at="köln"), call("c2", "add", x=[1, 2])]}
    (said,) = adapted(asked, form=form)
    parser = ToolParser(FORMATS[form], frozenset(("look", "add")))
    deltas = [*parser.push(said["content"]), *parser.finish()]
    assert [delta.name for delta in deltas if isinstance(delta, CallStart)] == ["look", "add"]
    written = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
    assert written.replace(" ", "") == '{"at":"köln"}{"x":[1,2]}'


@pytest.mark.parametrize("form", FORMATS)
def test_the_described_form_is_one_that_the_parser_reads(form: str) -> None:
    (system,) = adapted(tools=(ADD,), form=form)
    example = system["content"].rpartition("after it:\n")[2]
    parser = ToolParser(FORMATS[form], frozenset(("NAME",)))
    deltas = [*parser.push(example), *parser.finish()]
    assert [delta.name for delta in deltas if isinstance(delta, CallStart)] == ["NAME"]
