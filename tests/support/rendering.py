"""Chat templates rendered as their process renders them, but in this one."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from tandem.frontend.chat.adapted_messages import adapted
from tandem.frontend.chat.chat_template import ChatTemplate
from tandem.frontend.chat.render_frames import HEADER, PROMPT
from tandem.frontend.chat.render_worker import Renderer, answer
from tandem.frontend.chat.template_sandbox import RenderError, SandboxedTemplates
from tandem.frontend.chat.template_traits import TemplateTraits, probe_traits
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.model_folder import TemplateSource


def rendered(template: ChatTemplate, conversation: Conversation, ignored: IgnoredFields | None = None) -> str:
    """Render the prompt of a conversation as it is; raise ApiError as a chat would."""
    name = template.name_for(conversation)
    frame = template.request_frame(name, conversation, IgnoredFields() if ignored is None else ignored)
    try:
        text = _answered(_renderer(*_key(template)), frame)
    except RenderError as failure:
        raise template.failed(str(failure)) from None
    return template.prompt(conversation, text)


def adapted_prompt(template: ChatTemplate, conversation: Conversation, form: str = "json") -> str:
    """Render the prompt of a conversation as a chat does, with messages that the template takes.

    form: of the calls in text, if they are to become text.
    """
    name = template.name_for(conversation)
    traits = traits_of(name, *_key(template))
    return rendered(template, adapted(conversation, traits, FORMATS[form].syntax))


@cache
def traits_of(
    name: str, texts: tuple[tuple[str, str], ...], special_tokens: tuple[tuple[str, str], ...] = ()
) -> TemplateTraits:
    """Probe one of a model's templates."""
    template = ChatTemplate(TemplateSource(dict(texts), "a test"), dict(special_tokens))
    renderer = _renderer(texts, special_tokens)

    async def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        variables = {"tools": tools or None, "add_generation_prompt": True}
        try:
            return _answered(renderer, template.probe_frame(messages, variables, name))
        except RenderError:
            return ""

    return asyncio.run(probe_traits(render, needs_tools=name == "tool_use"))


_Items = tuple[tuple[str, str], ...]


def _key(template: ChatTemplate) -> tuple[_Items, _Items]:
    return tuple(template.source.texts.items()), tuple(template.templates.special_tokens.items())


@cache
def _renderer(texts: _Items, special_tokens: _Items) -> Renderer:
    """Return the renderer of a model's templates, which compiles each of them once."""
    template = ChatTemplate(TemplateSource(dict(texts), "a test"), dict(special_tokens))
    return Renderer(template.templates, SandboxedTemplates())


def _answered(renderer: Renderer, frame: bytes) -> str:
    reply = answer(renderer, frame[HEADER.size :])
    text = reply[HEADER.size :].decode()
    if HEADER.unpack_from(reply)[1] != PROMPT:
        raise RenderError(text)
    return text
