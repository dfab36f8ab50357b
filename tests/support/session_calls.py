"""Calls of the official client to a server's chats, sessions and scheduler."""

from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

MODEL = "tandem-default"
TURNS = ("What does textwrap.dedent do?", "What does os.path.join do?", "What does math.gcd do?")


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def turn(client: openai.OpenAI, messages: list[ChatCompletionMessageParam], **more: Any) -> ChatCompletion:
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=64, extra_body=more
    )
    assert isinstance(reply, ChatCompletion)
    return reply


def cached(reply: ChatCompletion) -> int:
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def inspected(client: openai.OpenAI) -> dict[str, Any]:
    root = str(client.base_url).removesuffix("v1/")
    return client.get(root + "admin/scheduler", cast_to=dict[str, Any])


def session_of(client: openai.OpenAI, name: str) -> dict[str, Any] | None:
    found = [session for session in inspected(client)["sessions"] if session["session_id"] == name]
    return found[0] if found else None


def end(client: openai.OpenAI, name: str) -> dict[str, Any]:
    return client.delete(f"/sessions/{name}", cast_to=dict[str, Any])
