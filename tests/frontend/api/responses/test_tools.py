"""The tools of a response: custom tools, namespaces and tools that are hosted elsewhere."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from tandem.frontend.api.responses.request import ResponsesRequest, parse_responses
from tandem.frontend.api.responses.tools import ResponseTools, ToolName, collect_tools, parse_tools
from tandem.frontend.errors import ApiError
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.tools import MAX_NAME_CHARS, ToolChoice

PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Find one.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ],
}
SEARCH = {"type": "web_search", "external_web_access": True}


def parsed(*tools: dict[str, Any]) -> tuple[ResponseTools, IgnoredFields]:
    ignored = IgnoredFields()
    return collect_tools([parse_tools(Raw(msgspec.json.encode(tools)), ignored)], ignored), ignored


def request(**fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "hi", **fields}
    return parse_responses(msgspec.json.encode(body), 1024, IgnoredFields())


def test_custom_tool_is_a_function_of_one_string() -> None:
    found, ignored = parsed(PATCH)
    (tool,) = found.tools
    assert (tool.name, tool.strict) == ("apply_patch", True)
    assert tool.parameters == {
        "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
        "additionalProperties": False,
    }  # fmt: skip
    assert found.names == {"apply_patch": ToolName("apply_patch", is_custom=True)}
    assert found.described == ({**PATCH, "format": None},)
    assert ignored.paths == ()


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", "[a-z]+", "^(?:[a-z]+)$"), ("regex", "^a|b$", "^(?:a|b)$"), ("regex", r"[^$]\$", r"^(?:[^$]\$)$"),
        ("regex", "(?=x)y", None), ("regex", r"\bword", None), ("regex", "a$b", None), ("lark", 'start: "a"', None),
    ],
)  # fmt: skip
def test_grammar_of_a_custom_tool_is_held_or_named(syntax: str, definition: str, pattern: str | None) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    found, ignored = parsed({**PATCH, "format": form})
    (tool,) = found.tools
    assert tool.parameters is not None
    assert tool.parameters["properties"]["input"].get("pattern") == pattern
    assert ignored.paths == (() if pattern else ("tools[].format",))
    described = tool.template_form["function"]["description"]
    assert described.startswith("Change files.\n\nThe input must match this")
    assert described.endswith(definition)
    assert found.described[0]["format"] == form


def test_tools_of_a_namespace_are_flattened() -> None:
    found, _ = parsed(CRM, {"type": "function", "name": "find"})
    assert found.names == {
        "crm__find": ToolName("find", "crm"),
        "crm__note": ToolName("note", "crm", is_custom=True),
        "find": ToolName("find"),
    }
    descriptions = [tool.template_form["function"].get("description") for tool in found.tools]
    assert descriptions == ["Customers.\n\nFind one.", None, None]
    assert found.model_name("find", "crm") == "crm__find"
    assert found.model_name("note") == "crm__note"
    assert found.model_name("gone", "crm") == "crm__gone"


def test_names_of_calls_are_looked_up_without_a_search() -> None:
    """A long conversation may have thousands of calls, and hundreds of tools."""
    other = {"type": "namespace", "name": "erp", "tools": [{"type": "function", "name": "find"}]}
    found, _ = parsed(CRM, other, {"type": "function", "name": "note"})
    tools = msgspec.structs.replace(found, names={})
    assert tools.model_name("find") == tools.model_name("find", "crm") == "crm__find"
    assert tools.model_name("find", "erp") == "erp__find"
    assert (tools.model_name("note"), tools.model_name("note", "erp")) == ("note", "erp__note")


def test_names_that_a_model_cannot_write_are_replaced() -> None:
    long = "x" * (MAX_NAME_CHARS + 9)
    tools = [{"type": "function", "name": name} for name in ("mcp:a/b", "a b", "a_b", long, long + "y")]
    found, _ = parsed(*tools, {**CRM, "name": "mcp__s__"})
    assert {known.name for known in found.names.values()} == {"mcp:a/b", "a b", "a_b", long, long + "y", "find", "note"}
    assert {"mcp__s__find", "mcp:a/b", "a_b"} < found.names.keys()
    assert all(tool.name in found.names and len(tool.name) <= MAX_NAME_CHARS for tool in found.tools)
    assert len({tool.name for tool in found.tools}) == 7


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([PATCH, PATCH], "tools[1].name"),
        ([{**CRM, "tools": [PATCH, PATCH]}], "tools[0].tools[1].name"),
        ([{**PATCH, "name": ""}], "tools[0].name"),
        ([{**PATCH, "format": {"type": "xml"}}], "tools[0].format.type"),
        ([{**CRM, "tools": [CRM]}], "tools[0].tools[0].type"),
        ([{"name": "x"}], "tools[0]"),
        (["x"], "tools[0]"),
    ],
)
def test_malformed_tool_is_rejected_with_its_path(tools: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(*tools)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_tools_hosted_elsewhere_are_dropped_and_named() -> None:
    found, ignored = parsed(SEARCH, PATCH, {"type": "mcp", "server_label": "x"}, SEARCH)
    assert [tool.name for tool in found.tools] == ["apply_patch"]
    assert found.hosted == ("web_search", "mcp", "web_search")
    assert ignored.paths == ("tools[].web_search", "tools[].mcp")


def test_items_add_tools_and_replace_those_before() -> None:
    again = {**PATCH, "description": "Newer."}
    added = {"type": "additional_tools", "role": "developer", "tools": [CRM, again, SEARCH]}
    found = request(tools=[PATCH], input=[added, {"role": "user", "content": "hi"}])
    assert [tool.name for tool in found.tools.tools] == ["crm__find", "crm__note", "apply_patch"]
    assert found.tools.tools[2].template_form["function"]["description"] == "Newer."
    assert found.tools.hosted == ("web_search",)
    assert [message["role"] for message in found.conversation(found.input).messages] == ["user"]
    later = request(input="more", previous_response_id="resp_1", tool_choice="required")
    assert [tool.name for tool in later.with_tools(found.input, IgnoredFields()).tools.tools] == [
        "crm__find", "crm__note", "apply_patch",
    ]  # fmt: skip
    with pytest.raises(ApiError) as caught:
        request(input=[{**added, "tools": [PATCH, {"type": "custom"}]}])
    assert caught.value.param == "input[0].tools[1]"


def test_choice_of_a_tool_that_is_hosted_elsewhere_is_refused() -> None:
    assert request(tools=[SEARCH], tool_choice="auto").tool_use.tools == ()
    assert request(tools=[SEARCH, PATCH], tool_choice="required").tool_use.choice == ToolChoice("required")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}
    for tools, choice in (
        ([SEARCH], "required"), ([SEARCH, PATCH], {"type": "web_search_preview"}), ([SEARCH, PATCH], allowed),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            request(tools=tools, tool_choice=choice)
        assert (caught.value.param or "").startswith("tool_choice")


def test_choice_names_tools_as_the_client_does() -> None:
    def chosen(choice: Any) -> tuple[list[str], ToolChoice]:
        use = request(tools=[PATCH, CRM, SEARCH], tool_choice=choice).tool_use
        return [tool.name for tool in use.tools], use.choice

    everything = ["apply_patch", "crm__find", "crm__note"]
    assert chosen({"type": "custom", "name": "apply_patch"}) == (everything, ToolChoice("required", "apply_patch"))
    named = {"type": "function", "name": "find", "namespace": "crm"}
    assert chosen(named) == (everything, ToolChoice("required", "crm__find"))
    allowed = {
        "type": "allowed_tools", "mode": "required",
        "tools": [{"type": "custom", "name": "note"}, {"type": "image_generation"}],
    }  # fmt: skip
    assert chosen(allowed) == (["crm__note"], ToolChoice("required"))


def test_tools_beyond_the_bound_on_their_json_are_refused() -> None:
    with pytest.raises(ApiError, match="1048576"):
        parsed({**PATCH, "description": "x" * 2**20})
