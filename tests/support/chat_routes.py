"""Chats on the three routes that have them, with answers in one shape, in front of a fake engine."""

import json
from typing import Any

from msgspec import Struct, field
from tokenizers import AddedToken

from tandem.frontend.chat.tool_formats import ALL_TAGS
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import post
from tests.support.shared_frontend import SharedFrontend

RAW = byte_level_tokenizer()
RAW.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ALL_TAGS])
RAW.add_tokens([AddedToken("<|other|>", special=True)])
IDS = {tag: RAW.token_to_id(tag) for tag in ALL_TAGS}
"""Tags that are tokens of RAW, with their ids."""

ROUTES = ["chat", "messages", "responses"]
QUESTION = {"role": "user", "content": "how do I join two paths?"}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
"""Schema of the function `look`."""


class Answer(Struct):
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = []
    ending: str = ""
    reasoning_tokens: int = 0


class Route(Struct, frozen=True):
    """One of the routes, with what differs between them."""

    path: str
    server: SharedFrontend
    parameters: dict[str, Any] = field(default_factory=lambda: PARAMETERS)
    """Schema of the arguments of the function `look`."""
    strict: bool = False

    def ask(self, text: str, stream: bool, tools: bool = False, **fields: Any) -> Answer:
        """Ask a question that the engine answers with these tokens."""
        ids = encode(text)
        self.server.engine.script = lambda submit: ids[: submit.sampling.max_tokens]
        fields = {"messages": [QUESTION], "model": "fake-model", "stream": stream, **fields}
        return getattr(self, f"_{self.path}")(fields, tools)

    def _function(self, schema_key: str) -> dict[str, Any]:
        return {"name": "look", schema_key: self.parameters, "strict": self.strict}

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        response = post(f"{self.server.server.url}/v1/{path}", json=fields)
        assert response.status_code == 200, response.text
        if not fields["stream"]:
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    def _chat(self, fields: dict[str, Any], tools: bool) -> Answer:
        given = {"tools": [{"type": "function", "function": self._function("parameters")}]}
        fields = {**fields, **(given if tools else {}), "stream_options": {"include_usage": True}}
        reply = self._post("chat/completions", fields if fields["stream"] else {**fields, "stream_options": None})
        answer = Answer()
        deltas = [reply["choices"][0]["message"]] if isinstance(reply, dict) else []
        chunks = [reply] if isinstance(reply, dict) else reply
        for chunk in chunks:
            for choice in chunk["choices"]:
                deltas += [choice["delta"]] if "delta" in choice else []
                answer.ending = choice["finish_reason"] or answer.ending
        for delta in deltas:
            answer.reasoning += delta.get("reasoning_content") or ""
            answer.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                if "name" in function:
                    answer.calls.append((function["name"], ""))
                answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + function["arguments"])
        answer.reasoning_tokens = chunks[-1]["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return answer

    def _messages(self, fields: dict[str, Any], tools: bool) -> Answer:
        if "stop" in fields:
            fields = {**fields, "stop_sequences": fields["stop"], "stop": None}
        given = {"tools": [self._function("input_schema")]} if tools else {}
        reply = self._post("messages", {"max_tokens": 200, **fields, **given})
        answer = Answer()
        if isinstance(reply, dict):
            for block in reply["content"]:
                answer.reasoning += block.get("thinking", "")
                answer.content += block.get("text", "")
                if block["type"] == "tool_use":
                    answer.calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
            answer.ending = reply["stop_reason"]
            answer.reasoning_tokens = reply["usage"]["output_tokens_details"]["thinking_tokens"]
            return answer
        for event in reply:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                answer.calls.append((event["content_block"]["name"], ""))
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                answer.reasoning += delta.get("thinking", "")
                answer.content += delta.get("text", "")
                if "partial_json" in delta:
                    answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + delta["partial_json"])
            if event["type"] == "message_delta":
                answer.ending = event["delta"]["stop_reason"]
                answer.reasoning_tokens = event["usage"]["output_tokens_details"]["thinking_tokens"]
        return answer

    def _responses(self, fields: dict[str, Any], tools: bool) -> Answer:
        given = {"tools": [{"type": "function", **self._function("parameters")}]}
        fields = {**fields, **(given if tools else {}), "input": fields["messages"]}
        del fields["messages"]
        reply = self._post("responses", fields)
        answer = Answer()
        last = reply if isinstance(reply, dict) else reply[-1]["response"]
        for item in last["output"]:
            if item["type"] == "function_call":
                answer.calls.append((item["name"], item["arguments"]))
            text = "".join(part["text"] for part in item.get("content", []))
            if item["type"] == "reasoning":
                answer.reasoning += text
            elif item["type"] == "message":
                answer.content += text
        answer.ending = last["status"]
        answer.reasoning_tokens = last["usage"]["output_tokens_details"]["reasoning_tokens"]
        return answer


def encode(text: str) -> list[int]:
    """Encode a text; what stands between ¦ and ¦ is spelled with tokens of a byte."""
    ids: list[int] = []
    for index, part in enumerate(text.split("¦")):
        for piece in list(part) if index % 2 else [part]:
            ids += RAW.encode(piece, add_special_tokens=False).ids
    return ids
