"""The response of `POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tandem.frontend.api.formatter import DONE, KEEP_ALIVE, UsageSoFar, error_event, response_head
from tandem.frontend.api.logprobs import chat_logprobs, prompt_logprobs
from tandem.frontend.chat.message import (
    CallArguments,
    CallStart,
    Content,
    Message,
    MessageDelta,
    Reasoning,
    join_deltas,
)
from tandem.frontend.chat.message_parser import MessageParser, MessageShape
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.usage import Usage

_encode = msgspec.json.encode


class ChatFormatter:
    """Format a response as prefix, encoded text and suffix.

    shape: the tool calls and reasoning that the text may contain.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, admitted: Admitted, shape: MessageShape) -> None:
        options = admitted.options
        self._admitted = admitted
        self._shape = shape
        self._parsers = [shape.new_parser() for _ in range(admitted.num_choices)]
        self._with_ids = options.return_token_ids
        self._with_logprobs = options.logprobs is not None
        self._as_ids = options.return_tokens_as_token_ids
        self._num_scored = len(admitted.prompts[0].ids) if options.returns_prompt_logprobs else 0
        """Number of prompt tokens with log-probabilities, which come before those of a choice."""
        self._include_usage = options.include_usage
        kind = "chat.completion.chunk" if options.stream else "chat.completion"
        reply = msgspec.structs.asdict(response_head("chatcmpl", kind, admitted.model))
        self._reply = {**reply, "service_tier": "default"}
        head = b"data: " + _encode(self._reply)[:-1]
        self._head = head
        self._prefixes = [b'%b,"choices":[{"index":%d,"delta":' % (head, i) for i in range(admitted.num_choices)]
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._usage_so_far = UsageSoFar(admitted) if options.continuous_usage else None
        self._as_functions = shape.tool_use.as_functions
        extras = self._with_ids or self._with_logprobs or options.continuous_usage
        self._content_only = shape.is_content_only and not extras
        self._after_content = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, usage: Usage) -> bytes:
        """Return a chunk per choice, with the role and any requested prompt ids."""
        # With tools or reasoning there may be no content.
        content = b'""' if self._shape.is_content_only else b"null"
        delta = b'{"role":"assistant","content":%b,"refusal":null}' % content
        return b"".join([self._chunk(index, delta, self._prompt_ids(index)) for index in range(len(self._prefixes))])

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return self._piece(pieces[0]) if len(pieces) == 1 else b"".join([self._piece(piece) for piece in pieces])

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + _encode(self._usage(usage)) + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        shown = [self._choice(piece) for piece in choices]
        reply = {**self._reply, "choices": shown, "usage": self._usage(usage)}
        if self._num_scored:
            reply["prompt_logprobs"] = prompt_logprobs(choices[0].logprobs[: self._num_scored])
        return _encode(reply)

    def _piece(self, piece: ChoiceDelta) -> bytes:
        if self._content_only and not piece.finish_reason:
            text = piece.text
            return self._prefixes[piece.index] + b'{"content":' + _encode(text) + self._after_content if text else b""
        if self._usage_so_far is not None:
            self._usage_so_far.add(piece)
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._with_ids else b""
        scored = piece.logprobs if self._with_logprobs else ()
        logprobs = _encode(chat_logprobs(scored, self._as_ids)) if scored else b"null"
        parser = self._parsers[piece.index]
        if self._shape.is_content_only:
            shown = [b'{"content":%b}' % _encode(piece.text)] if piece.text else []
        else:
            shown = [_delta(delta, self._as_functions) for delta in parser.push(piece)]
        if (ids or logprobs != b"null") and not shown and not piece.finish_reason:
            shown = [b"{}"]
        chunks: list[bytes] = []
        for delta in shown:
            chunks.append(self._chunk(piece.index, delta, ids, logprobs=logprobs))
            ids, logprobs = b',"token_ids":[]' if ids else b"", b"null"
        if piece.finish_reason:
            reason = b'"%b"' % self._finish_reason(parser, piece.finish_reason).encode()
            chunks.append(self._chunk(piece.index, b"{}", ids, reason, logprobs))
        return b"".join(chunks)

    def _chunk(
        self, index: int, delta: bytes, extra: bytes = b"", finish: bytes = b"null", logprobs: bytes = b"null"
    ) -> bytes:
        tail = self._tail if self._usage_so_far is None else self._usage_so_far.tail(index)
        shown = (self._prefixes[index], delta, logprobs, extra, finish, tail)
        return b'%b%b,"logprobs":%b%b,"finish_reason":%b}]%b' % shown

    def _prompt_ids(self, index: int) -> bytes:
        return b',"prompt_token_ids":' + _encode(self._admitted.prompt_of(index).ids) if self._with_ids else b""

    def _choice(self, piece: ChoiceDelta) -> dict[str, Any]:
        parser: MessageParser = self._parsers[piece.index]
        message = join_deltas(parser.push(piece))
        scored = piece.logprobs[self._num_scored :]
        logprobs = chat_logprobs(scored, self._as_ids) if self._with_logprobs else None
        choice: dict[str, Any] = {
            "index": piece.index,
            "message": _message(message, self._as_functions),
            "logprobs": logprobs,
        }
        choice["finish_reason"] = self._finish_reason(parser, piece.finish_reason or "stop")
        if self._with_ids:
            choice |= {"prompt_token_ids": self._admitted.prompt_of(piece.index).ids, "token_ids": piece.token_ids}
        return choice

    def _finish_reason(self, parser: MessageParser, reason: str) -> str:
        found = parser.finish_reason(reason)
        return "function_call" if self._as_functions and found == "tool_calls" else found

    def _usage(self, usage: Usage) -> dict[str, Any]:
        counts = [parser.reasoning_tokens for parser in self._parsers]
        known = [count for count in counts if count is not None]
        shown = {name: value for name, value in msgspec.structs.asdict(usage).items() if value is not UNSET}
        predicted = shown.pop("completion_tokens_details", None)
        details = {} if predicted is None else msgspec.structs.asdict(predicted)
        if len(known) == len(counts):
            details["reasoning_tokens"] = sum(known)
        return {**shown, "completion_tokens_details": details} if details else shown


def _delta(delta: MessageDelta, as_functions: bool) -> bytes:
    match delta:
        case CallStart(_, _, name) if as_functions:
            return _encode({"function_call": {"name": name, "arguments": ""}})
        case CallArguments(_, text) if as_functions:
            return b'{"function_call":{"arguments":%b}}' % _encode(text)
        case Content(text):
            return b'{"content":%b}' % _encode(text)
        case Reasoning(text):
            return b'{"reasoning_content":%b}' % _encode(text)
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return _encode({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, _encode(text))


def _message(message: Message, as_functions: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None, "annotations": []}
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.calls and as_functions:
        shown["function_call"] = {"name": message.calls[0].name, "arguments": message.calls[0].arguments}
    elif message.calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return shown
