"""Convert a conversation to an admitted request and the settings for parsing its outputs."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from msgspec import Struct, structs

from tandem.frontend.chat.adapted_messages import adapted
from tandem.frontend.chat.chat_template import ChatTemplate, no_template
from tandem.frontend.chat.message_parser import MessageShape, message_opens_thinking, prompt_opens_thinking
from tandem.frontend.chat.render_frames import json_frame
from tandem.frontend.chat.template_probes import TemplateFacts, probe_template
from tandem.frontend.chat.template_process import TemplateProcess
from tandem.frontend.chat.template_sandbox import TOOK_TOO_LONG, RenderError
from tandem.frontend.chat.template_traits import TemplateTraits, probe_traits
from tandem.frontend.chat.tool_formats import FORMATS, MODEL_FORMATS, ToolFormat, tool_format_name
from tandem.frontend.generation.admission import Admission, Admitted
from tandem.frontend.generation.output_tags import NO_TAGS, OutputTags, TagToken
from tandem.frontend.generation.stage import Stage
from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS, ThinkingMode, ThinkTags
from tandem.frontend.metrics.frontend_metrics import TemplateMetrics
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.special_tokens import SpecialTokenGuard
from tandem.frontend.workers import Workers
from tandem.protocol.events import Ready

logger = logging.getLogger(__name__)

MAX_INLINE_MESSAGES, MAX_INLINE_CHARS = 256, 32 * 1024
"""Largest conversation that is encoded on the event loop's thread, in messages and characters."""


REASONING_TAGS = {"think": THINK_TAGS, "mistral": MISTRAL_THINK_TAGS}
"""Tags around reasoning, by value of `--reasoning-parser`."""


class Parsers(Struct, frozen=True):
    """Settings for parsing outputs."""

    tools: str
    """Name of the tool call format, or "auto"."""
    reasoning: str
    """Name of the reasoning tags, "none", or "auto"."""
    model_types: Sequence[str]
    tokens: Mapping[int, TagToken]
    """Tags that are a single token, by id."""

    def tool_format(self, facts: TemplateFacts) -> ToolFormat:
        """Return the tool call format of a model, given the facts of its template."""
        return FORMATS[self._tool_format_name(facts)]

    def think_tags(self, facts: TemplateFacts) -> ThinkTags | None:
        """Return the reasoning tags of a model, given the facts of its template; None if it does not reason.

        A vocabulary with tokens for the tags means that the model may reason, even if its template has no tags.
        """
        if self.reasoning != "auto":
            return REASONING_TAGS.get(self.reasoning)
        known = (tags for tags in REASONING_TAGS.values() if self._texts.issuperset(tags.texts))
        return facts.think_tags or next(known, None)

    def summary(self, facts: TemplateFacts) -> str:
        """Return the names of the chosen parsers and where they come from, for the log."""
        tags = self.think_tags(facts)
        by_type = "model type" if any(kind in MODEL_FORMATS for kind in self.model_types) else "default"
        tools = _origin(self.tools, "--tool-parser", facts.call_format, by_type)
        shown = "none"
        if tags is not None:
            name = next(name for name, known in REASONING_TAGS.items() if known == tags)
            shown = f"{name} ({_origin(self.reasoning, '--reasoning-parser', facts.think_tags, 'vocabulary')})"
        return f"tool calls: {self._tool_format_name(facts)} ({tools}); reasoning: {shown}"

    def _tool_format_name(self, facts: TemplateFacts) -> str:
        return tool_format_name(self.tools, self.model_types, self._texts, facts.call_format)

    @property
    def _texts(self) -> set[str]:
        return {token.text for token in self.tokens.values()}


def _origin(option: str, flag: str, in_template: object, otherwise: str) -> str:
    """Return what decided on a parser: a flag, the chat template, or `otherwise`."""
    if option != "auto":
        return flag
    return "chat template" if in_template is not None else otherwise


class _Probed(Struct, frozen=True):
    """Results of probing the templates."""

    facts: TemplateFacts
    traits: dict[str, TemplateTraits]
    """Traits by template name, excluding templates that took too long."""


class Chat:
    """Render and admit conversations with the served model."""

    def __init__(
        self,
        template: ChatTemplate | None,
        parsers: Parsers,
        admission: Admission,
        workers: Workers,
        metrics: TemplateMetrics,
        guard: SpecialTokenGuard | None = None,
    ) -> None:
        """Keep the parts.

        `template` is None for a model without a chat template; `workers` encode large conversations. With a `guard`,
        prompts are sealed by it.
        """
        self._template = template
        self._renderer = None if template is None else TemplateProcess(json_frame(template.templates), metrics)
        self._parsers = parsers
        self._probes: asyncio.Task[_Probed] | None = None
        """Task of the template probes; None until they start."""
        self._admission = admission
        self._workers = workers
        self._metrics = metrics
        self._guard = guard

    def start(self) -> None:
        """Start the render process in the background; otherwise the first conversation waits for it."""
        if self._renderer is not None:
            self._renderer.start()
            self._begin_probes()

    @property
    def renderer_pid(self) -> int | None:
        """Return the pid of the render process; None if it is not running."""
        return None if self._renderer is None else self._renderer.pid

    async def close(self) -> None:
        """End the render process."""
        if self._probes is not None:
            self._probes.cancel()
        if self._renderer is not None:
            await self._renderer.close()

    async def render(self, conversation: Conversation, ignored: IgnoredFields, client: str = "") -> str:
        """Render the prompt of a conversation, with special tokens.

        Messages that the template does not support are adapted first. With a guard the prompt is sealed. `client` is
        the name of the API key.

        Raises ApiError 400 if the model has no chat template or the template fails, and 500 if the render process
        fails.
        """
        template, renderer = self._template, self._renderer
        if template is None or renderer is None:
            raise no_template("its directory has no chat template, and its type has no built-in one")
        name = template.name_for(conversation)
        began = monotonic()
        arguments = (template, name, await self._probed(), conversation, ignored)
        if _is_small(conversation):
            request = self._request_frame(*arguments)
        else:
            request = await self._workers.run(self._request_frame, *arguments)
        try:
            rendered = await renderer.render(request, client)
        except RenderError as failure:
            reason = str(failure) if self._guard is None else self._guard.unmarked(str(failure))
            raise template.failed(reason) from None
        finally:
            self._metrics.seconds.observe(monotonic() - began)
        prompt = template.prompt(conversation, rendered)
        if self._guard is None:
            return prompt
        inline = len(prompt) <= MAX_INLINE_CHARS
        return self._guard.seal(prompt) if inline else await self._workers.run(self._guard.seal, prompt)

    async def admit(
        self,
        options: GenerationOptions,
        conversation: Conversation,
        tool_use: ToolUse,
        ready: Ready,
        ignored: IgnoredFields,
        client: str = "",
    ) -> tuple[Admitted, MessageShape]:
        """Render, encode and check a conversation.

        Fields without effect are recorded in `ignored`. `client` is the name of the API key. Raises ApiError if the
        conversation cannot be rendered or the request cannot be admitted.
        """
        self._admission.named(options.model, ready.model)
        begun = monotonic()
        prompt = await self.render(conversation, ignored, client)
        rendered = Stage("render", begun, monotonic())
        text = prompt if self._guard is None else self._guard.unsealed(prompt)
        facts = (await self._probed()).facts
        shape = self._shape(facts, conversation, text, tool_use, options.skip_special_tokens, ready.model.vocab_size)
        admitted = await self._admission.admit(
            options,
            [prompt],
            ready,
            field="messages",
            add_special_tokens=False,
            tool_use=tool_use,
            syntax=None if shape.tool_format is None else shape.tool_format.syntax,
            tags=shape.tags,
            ignored=ignored,
            client=client,
            stages=(rendered,),
        )
        return admitted, shape

    def _begin_probes(self) -> asyncio.Task[_Probed]:
        if self._probes is None or (self._probes.done() and (self._probes.cancelled() or self._probes.exception())):
            self._probes = asyncio.get_running_loop().create_task(self._probe())
            # Mark a failure as retrieved in case no request awaits the task; the render process has logged it.
            self._probes.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._probes

    async def _probed(self) -> _Probed:
        """Return the results of the template probes, which run once.

        Raises ApiError 500 if the render process fails; the next request tries again.
        """
        return await asyncio.shield(self._begin_probes())

    async def _probe(self) -> _Probed:
        template, renderer = self._template, self._renderer
        assert template is not None and renderer is not None, "a model without a template renders nothing"
        is_stopped = False

        async def render(messages: Sequence[dict[str, Any]], variables: dict[str, Any], name: str | None = None) -> str:
            nonlocal is_stopped
            if is_stopped:
                return ""
            try:
                return await renderer.render(template.probe_frame(messages, variables, name))
            except RenderError as failure:
                # A template that took too long would do so again.
                is_stopped = TOOK_TOO_LONG in str(failure)
                return ""

        async def render_probe(name: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
            return await render(messages, {"tools": tools or None, "add_generation_prompt": True}, name)

        facts = await probe_template(render)
        logger.info("%s", self._parsers.summary(facts))
        traits = {
            name: await probe_traits(partial(render_probe, name), needs_tools=name == "tool_use")
            for name in template.source.texts
        }
        return _Probed(facts, {} if is_stopped else traits)

    def _request_frame(
        self, template: ChatTemplate, name: str, probed: _Probed, conversation: Conversation, ignored: IgnoredFields
    ) -> bytes:
        if (guard := self._guard) is not None:
            conversation = structs.replace(
                conversation,
                messages=guard.protect(conversation.messages),
                tools=guard.protect(conversation.tools),
                documents=guard.protect(conversation.documents),
                template_kwargs=guard.protect(conversation.template_kwargs),
            )
        # After `guard.protect`, because the call format contains some.
        syntax = self._parsers.tool_format(probed.facts).syntax
        conversation = adapted(conversation, probed.traits.get(name, TemplateTraits()), syntax)
        return template.request_frame(name, conversation, ignored)

    def _shape(
        self,
        facts: TemplateFacts,
        conversation: Conversation,
        prompt: str,
        tool_use: ToolUse,
        drops_special: bool,
        vocab_size: int,
    ) -> MessageShape:
        tool_format = self._parsers.tool_format(facts) if tool_use.active else None
        think_tags = self._parsers.think_tags(facts)
        texts = set(() if tool_format is None else tool_format.tags)
        tags = NO_TAGS
        if think_tags is not None:
            texts |= set(think_tags.texts)
            tags = OutputTags(thinking=_thinking(conversation, prompt, think_tags), think=think_tags)
        # The model writes a tag as text if its token id exceeds the vocabulary.
        tokens = {
            token_id: token
            for token_id, token in self._parsers.tokens.items()
            if token.text in texts and token_id < vocab_size
        }
        return MessageShape(tool_use, tool_format, structs.replace(tags, tokens=tokens), drops_special)


def _thinking(conversation: Conversation, prompt: str, tags: ThinkTags) -> ThinkingMode:
    """Return how outputs of a rendered conversation begin."""
    opened = prompt_opens_thinking(prompt, tags)
    if conversation.continue_final_message and not opened:
        # The template may have closed or dropped the reasoning that the message leaves open.
        written = conversation.messages[-1].get("content") or ""
        opened = message_opens_thinking(written, tags) and prompt.rfind(tags.start) > prompt.rfind(tags.end)
    return ThinkingMode.OPEN if opened else ThinkingMode.OPTIONAL


def _is_small(conversation: Conversation) -> bool:
    """Return True if encoding a conversation takes less time than starting a thread.

    Conversations with anything but a few texts count as large.
    """
    messages = conversation.messages
    if len(messages) > MAX_INLINE_MESSAGES or conversation.tools or conversation.documents:
        return False
    chars = 0
    for message in messages:
        content = message.get("content")
        if len(message) > 2 or type(content) is not str:  # more than a role and a text
            return False
        chars += len(content)
    return chars <= MAX_INLINE_CHARS and not conversation.template_kwargs
