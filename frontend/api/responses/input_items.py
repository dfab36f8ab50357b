"""The field `input` of `/v1/responses`: the items of a conversation."""

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
    """A text of the user, or of a tool."""

    text: str
    prompt_cache_breakpoint: Raw = field(default_factory=Raw)


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str
    annotations: Raw = field(default_factory=Raw)
    logprobs: Raw = field(default_factory=Raw)


class Refusal(Struct, tag_field="type", tag="refusal"):
    """A refusal of the model."""

    refusal: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning itself."""

    text: str


class Message(Struct):
    """A message of any role but a tool's."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Struct):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class CustomCall(Struct):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class CallOutput(Struct):
    """The result of a call of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Raw = field(default_factory=Raw)


class LocalCall(Struct):
    """A call of a tool that OpenAI's models know and that runs at the client."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    id: str | None = None
    status: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    environment: Raw = field(default_factory=Raw)
    caller: Raw = field(default_factory=Raw)


class ShellText(Struct):
    """The output of one command of a shell."""

    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] = {}


class LocalOutput(Struct):
    """The result of a call of a tool that OpenAI's models know."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    output: str | list[ShellText] | None = None
    call_id: str | None = None
    id: str | None = None
    status: str | None = None
    max_output_length: int | None = None
    caller: Raw = field(default_factory=Raw)


class Reasoning(Struct):
    """Reasoning of the model ahead of what it said or called."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: _Status | None = None


class AdditionalTools(Struct):
    """Tools that the model may call from here on."""

    type: Literal["additional_tools"]
    tools: Raw
    role: Literal["developer"] = "developer"
    id: str | None = None


class Reference(Struct):
    """An item that is stored, by its id."""

    id: str
    type: Literal["item_reference"] | None = None


class Dropped(Struct):
    """A record of a tool that OpenAI hosts, which says nothing to another model."""

    type: str
    id: str | None = None


class _ItemHead(Struct):
    type: str | None = None
    role: Raw = field(default_factory=Raw)
    id: Raw = field(default_factory=Raw)

    @property
    def kind(self) -> str:
        """The type, which a message and a reference may leave out."""
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
"""Most characters of the id of an item."""
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
    """Its JSON as the client wrote it."""
    tools: ToolSpecs | None = None
    """The tools that the item adds."""

    @property
    def is_kept(self) -> bool:
        """True for an item that is stored with its response."""
        return not isinstance(self.item, Dropped)


def parse_input(raw: Raw, ignored: IgnoredFields) -> list[InputItem]:
    """Parse the items of an input.

    Raises ApiError 400 for an item that is malformed or not supported; `param` is the path of the fault.
    """
    found = _split(raw)
    if isinstance(found, str):
        return [InputItem(Message("user", found), b"")]
    if not found:
        raise malformed("{param} is an empty array; give at least one item", "input")
    return [_item(data, index, ignored) for index, data in enumerate(found)]


def parse_stored(items: Sequence[StoredItem]) -> list[InputItem]:
    """Parse items of a store, which were checked when they arrived."""
    unnoticed = IgnoredFields()
    return [_item(Raw(item.body), index, unnoticed) for index, item in enumerate(items)]


def check_parts(bodies: Sequence[bytes]) -> None:
    """Raise ApiError 400 for JSON with more messages or parts than an input may have.

    It counts the names of their fields, before they are parsed.
    """
    # In valid JSON these bytes are a key or a string of their own: quotes within a text have a backslash.
    for name, most in ((b'"role"', MAX_MESSAGES), (b'"type"', MAX_PARTS)):
        if (count := sum([body.count(name) for body in bodies])) > most:
            raise unsupported(f"{{param}} takes at most {most} of {name.decode()}, not {count}", "input")


def check_count(count: int) -> None:
    """Raise ApiError 400 for more items than a conversation may have."""
    if count > MAX_PARTS:
        raise unsupported(f"{{param}} and the stored items are {count} items; at most {MAX_PARTS} are allowed", "input")


def stored_item(given: InputItem) -> StoredItem:
    """Return an item as it is stored: with an id, a status where its kind has one, and texts in parts.

    What another server has encrypted means nothing here, and is not stored.
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
