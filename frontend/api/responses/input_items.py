"""Parse the field `input` of `/v1/responses`: the items of a conversation."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from tandem.frontend.api.responses.carried_reasoning import read_reasoning
from tandem.frontend.api.responses.tools import ToolSpecs, parse_tools
from tandem.frontend.errors import malformed, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.messages import MAX_MESSAGES, MAX_PARTS
from tandem.frontend.request.schema import STRING, Schema, array, of_type
from tandem.frontend.request.values import TypedDecoder
from tandem.frontend.store.store import StoredItem

_Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text from the user or a tool."""

    text: str
    prompt_cache_breakpoint: Raw = field(default_factory=Raw)


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text from the model."""

    text: str
    annotations: Raw = field(default_factory=Raw)
    logprobs: Raw = field(default_factory=Raw)


class Refusal(Struct, tag_field="type", tag="refusal"):
    """Refusal by the model."""

    refusal: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """Summary of reasoning."""

    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str


class Message(Struct):
    """Message of any role except `tool`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Struct):
    """Function call."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class CustomCall(Struct):
    """Custom tool call."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class CallOutput(Struct):
    """Result of a function call or custom tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class LocalCall(Struct):
    """Call of a tool built into OpenAI's models that the client runs, such as a shell."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    id: str | None = None
    status: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    environment: Raw = field(default_factory=Raw)
    caller: Raw = field(default_factory=Raw)


class ShellText(Struct):
    """Output of one shell command."""

    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] = {}


class LocalOutput(Struct):
    """Result of a `LocalCall`."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    output: str | list[ShellText] | None = None
    call_id: str | None = None
    id: str | None = None
    status: str | None = None
    max_output_length: int | None = None
    caller: Raw = field(default_factory=Raw)


class Reasoning(Struct):
    """Reasoning of the model that precedes a message or a call."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: _Status | None = None


class AdditionalTools(Struct):
    """Tools available to the model from this item on."""

    type: Literal["additional_tools"]
    tools: Raw
    role: Literal["developer"] = "developer"
    id: str | None = None


class Reference(Struct):
    """Reference to a stored item by id."""

    id: str
    type: Literal["item_reference"] | None = None


class Dropped(Struct):
    """Call of a tool hosted by OpenAI; dropped, because other models do not know it."""

    type: str
    id: str | None = None


class _ItemHead(Struct):
    type: str | None = None
    role: Raw = field(default_factory=Raw)
    id: Raw = field(default_factory=Raw)

    @property
    def kind(self) -> str:
        """Return the type, which messages and references may omit."""
        is_reference = self.type is None and memoryview(self.id) and not memoryview(self.role)
        return self.type or ("item_reference" if is_reference else "message")


Item = (
    Message
    | FunctionCall
    | CustomCall
    | CallOutput
    | LocalCall
    | LocalOutput
    | Reasoning
    | AdditionalTools
    | Reference
    | Dropped
)
_ITEMS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": CallOutput,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CallOutput,
    "reasoning": Reasoning,
    "additional_tools": AdditionalTools,
    "item_reference": Reference,
    **dict.fromkeys(("local_shell_call", "shell_call", "apply_patch_call"), LocalCall),
    **dict.fromkeys(("local_shell_call_output", "shell_call_output", "apply_patch_call_output"), LocalOutput),
}
MAX_ITEM_ID = 1024
"""Maximum length of an item id, in characters."""
HOSTED_ITEMS = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "tool_search_call", "tool_search_output", "compaction", "context_compaction", "compaction_trigger",
    "ghost_snapshot",
)  # fmt: skip
"""Items that are dropped, and recorded as ignored."""

_HOSTED: Schema = {"type": "object", "properties": {"type": {"enum": [*HOSTED_ITEMS]}}, "required": ["type"]}
INPUT: Schema = {
    "anyOf": [
        STRING,
        array({"anyOf": [*(of_type(item) for item in dict.fromkeys(_ITEMS.values())), _HOSTED]}, MAX_PARTS, 1),
    ]
}
_INPUT_DECODER = TypedDecoder(str | list[Raw])
_HEAD_DECODER = TypedDecoder(_ItemHead)
_DECODERS = {name: TypedDecoder(item) for name, item in _ITEMS.items()}


class InputItem(Struct, frozen=True):
    """One item of the input."""

    item: Item
    raw: bytes
    """JSON as the client sent it."""
    tools: ToolSpecs | None = None
    """Tools that the item adds."""

    @property
    def is_kept(self) -> bool:
        """Return True if the item is stored with its response."""
        return not isinstance(self.item, Dropped)


def parse_input(raw: Raw, ignored: IgnoredFields) -> list[InputItem]:
    """Parse the items of an input.

    Raises ApiError 400 if an item is malformed or unsupported; `param` is the path of the error.
    """
    found = _split(raw)
    if isinstance(found, str):
        return [InputItem(Message("user", found), b"")]
    if not found:
        raise malformed("{param} is an empty array; give at least one item", "input")
    return [_item(data, index, ignored) for index, data in enumerate(found)]


def parse_stored(items: Sequence[StoredItem]) -> list[InputItem]:
    """Parse stored items, which were validated when they arrived."""
    unnoticed = IgnoredFields()
    return [_item(Raw(item.body), index, unnoticed) for index, item in enumerate(items)]


def check_parts(bodies: Sequence[bytes]) -> None:
    """Raise ApiError 400 if JSON exceeds the maximum number of messages or parts.

    Counts field names instead of parsing the JSON.
    """
    # In valid JSON these bytes are a key or a whole string: quotes within a text are escaped.
    for name, limit in ((b'"role"', MAX_MESSAGES), (b'"type"', MAX_PARTS)):
        if (count := sum([body.count(name) for body in bodies])) > limit:
            raise unsupported(f"{{param}} takes at most {limit} of {name.decode()}, not {count}", "input")


def check_count(count: int) -> None:
    """Raise ApiError 400 if a conversation has too many items."""
    if count > MAX_PARTS:
        raise unsupported(f"{{param}} and the stored items are {count} items; at most {MAX_PARTS} are allowed", "input")


def stored_item(given: InputItem) -> StoredItem:
    """Return the stored form of an item: with an id, a status if its type has one, and text as parts.

    `encrypted_content` written by another server is not stored.
    """
    item = given.item
    status = {"status": "completed"} if getattr(item, "status", "completed") is None else {}
    is_foreign = isinstance(item, Reasoning) and item.encrypted_content and not read_reasoning(item.encrypted_content)
    if isinstance(item, Message) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        part = {"type": kind, "text": item.content, **({"annotations": []} if item.role == "assistant" else {})}
        fields: dict[str, Any] = {"type": "message", "role": item.role, "status": "completed", "content": [part]}
    elif item.id is not None and not status and not is_foreign:
        return StoredItem(item.id, given.raw)
    else:
        fields = {"type": item.type, **msgspec.json.decode(given.raw, type=dict[str, Raw]), **status}
        if is_foreign:
            del fields["encrypted_content"]
    item_id = item.id or f"{_ID_PREFIXES.get(item.type or '', 'item')}_{secrets.token_hex(24)}"
    return StoredItem(item_id, msgspec.json.encode({**fields, "id": item_id}))


_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def _split(raw: Raw) -> str | list[Raw]:
    data = bytes(memoryview(raw))
    if not data.startswith(b'"'):
        check_parts([data])
    found: str | list[Raw] = _INPUT_DECODER.decode(data, "input")
    if len(found) > MAX_PARTS and not isinstance(found, str):
        raise unsupported(f"{{param}} takes at most {MAX_PARTS} items, not {len(found)}", "input")
    return found


def _item(data: Raw, index: int, ignored: IgnoredFields) -> InputItem:
    path = f"input[{index}]"
    kind = _HEAD_DECODER.decode(data, path).kind
    if kind in HOSTED_ITEMS and not ignored.refuse:
        ignored.add(f"{path}.{kind}")
        return InputItem(Dropped(kind), bytes(data))
    if kind not in _ITEMS:
        known = ", ".join(_ITEMS)
        raise unsupported(f"{{param}}: {kind[:40]!r} is not supported; this server accepts {known}", f"{path}.type")
    item = _DECODERS[kind].read(data, path, ignored)
    if item.id is not None and len(item.id) > MAX_ITEM_ID:
        raise unsupported(f"{{param}} takes at most {MAX_ITEM_ID} characters, not {len(item.id)}", f"{path}.id")
    tools = parse_tools(item.tools, ignored, f"{path}.tools") if isinstance(item, AdditionalTools) else None
    return InputItem(item, bytes(data), tools)
