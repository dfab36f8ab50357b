"""Turn a conversation into an admitted request.

The result includes the shape in which the request's outputs are parsed.
"""

from time import monotonic

from msgspec import structs

from tandem.frontend.chat.chat_template import ChatTemplate, no_template
from tandem.frontend.chat.message_parser import MessageShape, prompt_opens_thinking
from tandem.frontend.chat.render_frames import json_frame
from tandem.frontend.chat.template_process import TemplateProcess
from tandem.frontend.chat.template_sandbox import RenderError
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.tool_prompt import with_tools_as_text
from tandem.frontend.generation.admission import Admission, Admitted
from tandem.frontend.generation.stage import Stage
from tandem.frontend.grammar.grammar import THINK_END, ThinkingMode
from tandem.frontend.metrics.frontend_metrics import TemplateMetrics
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.special_tokens import SpecialTokenGuard
from tandem.frontend.workers import Workers
from tandem.protocol.events import Ready

MAX_INLINE_MESSAGES, MAX_INLINE_CHARS = 256, 32 * 1024
"""Largest conversation that is encoded in the event loop."""


class Chat:
    """Render and admit conversations with the served model.

    `think_end_id` is the token that ends reasoning, or None if the model has no such token.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tool_format: ToolFormat,
        reasoning_parser: str,
        think_end_id: int | None,
        admission: Admission,
        workers: Workers,
        metrics: TemplateMetrics,
        guard: SpecialTokenGuard | None = None,
    ) -> None:
        """Connect the parts.

        `template` is None for a model that has no chat template; `workers` encode large conversations.
        With a `guard`, prompts are sealed by it.
        """
        self._template = template
        self._renderer = None if template is None else TemplateProcess(json_frame(template.templates), metrics)
        self._tool_format = tool_format
        self._reasoning_parser = reasoning_parser
        self._think_end_id = think_end_id
        self._admission = admission
        self._workers = workers
        self._metrics = metrics
        self._guard = guard

    def start(self) -> None:
        """Begin to start the process that renders.

        Without this call the first conversation waits for it.
        """
        if self._renderer is not None:
            self._renderer.start()

    @property
    def renderer_pid(self) -> int | None:
        """Id of the process that renders; None while there is none."""
        return None if self._renderer is None else self._renderer.pid

    async def close(self) -> None:
        """End the process that renders."""
        if self._renderer is not None:
            await self._renderer.close()

    async def render(self, conversation: Conversation, ignored: IgnoredFields, client: str = "") -> str:
        """Render the prompt of a conversation, with its special tokens.

        If the template does not render tools, they are described in the messages. With a guard the prompt is sealed.
        `client` is the name of the API key.

        Raises ApiError 400 if the model has no chat template, or if the template fails, and 500 if the process that
        renders it fails.
        """
        template, renderer = self._template, self._renderer
        if template is None or renderer is None:
            raise no_template("its directory has no chat template, and its type has no built-in one")
        began = monotonic()
        if _is_small(conversation):
            request = self._request_frame(template, conversation, ignored)
        else:
            request = await self._workers.run(self._request_frame, template, conversation, ignored)
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

        Fields without effect are recorded in `ignored`. Raises ApiError if the conversation cannot be rendered, or if
        the request cannot be admitted. `client` is the name of the API key.
        """
        self._admission.named(options.model, ready.model)
        begun = monotonic()
        prompt = await self.render(conversation, ignored, client)
        rendered = Stage("render", begun, monotonic())
        shape = self._shape(tool_use, prompt if self._guard is None else self._guard.unsealed(prompt))
        if shape.tool_format is not None and shape.tool_format.special_tokens:
            options = structs.replace(options, skip_special_tokens=False)
        admitted = await self._admission.admit(
            options,
            [prompt],
            ready,
            field="messages",
            add_special_tokens=False,
            tool_use=tool_use,
            syntax=self._tool_format.syntax,
            thinking=shape.thinking,
            ignored=ignored,
            client=client,
            stages=(rendered,),
        )
        return admitted, shape

    def _request_frame(self, template: ChatTemplate, conversation: Conversation, ignored: IgnoredFields) -> bytes:
        if (guard := self._guard) is not None:
            conversation = structs.replace(
                conversation,
                messages=guard.protect(conversation.messages),
                tools=guard.protect(conversation.tools),
                documents=guard.protect(conversation.documents),
                template_kwargs=guard.protect(conversation.template_kwargs),
            )
        if not template.reads_tools:
            # After the above, because the format of calls has special tokens of its own.
            conversation = with_tools_as_text(conversation, self._tool_format.syntax)
        return template.request_frame(conversation, ignored)

    def _shape(self, tool_use: ToolUse, prompt: str) -> MessageShape:
        thinking = ThinkingMode.NONE
        if self._may_think:
            thinking = ThinkingMode.OPEN if prompt_opens_thinking(prompt) else ThinkingMode.OPTIONAL
        return MessageShape(
            tool_use=tool_use,
            tool_format=self._tool_format if tool_use.active else None,
            thinking=thinking,
            think_end_id=self._think_end_id,
        )

    @property
    def _may_think(self) -> bool:
        """Tell whether outputs may start with reasoning.

        With "auto" they may if the template mentions the closing tag: such templates strip the reasoning of earlier
        turns.
        """
        if self._reasoning_parser == "auto":
            return self._template is not None and self._template.mentions(THINK_END)
        return self._reasoning_parser == "think"


def _is_small(conversation: Conversation) -> bool:
    """Tell whether a conversation takes less time to encode than a thread to begin.

    One with anything but a few texts counts as large.
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
