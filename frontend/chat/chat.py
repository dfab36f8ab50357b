"""Turn a conversation into an admitted request.

The result includes the shape in which the request's outputs are parsed.
"""

from time import monotonic

from msgspec import structs

from tandem.frontend.chat.chat_template import ChatTemplate, no_template
from tandem.frontend.chat.message_parser import MessageShape, prompt_opens_thinking
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.chat.tool_prompt import with_tools_as_text
from tandem.frontend.generation.admission import Admission, Admitted
from tandem.frontend.generation.stage import Stage
from tandem.frontend.grammar.grammar import THINK_END, ThinkingMode
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers
from tandem.protocol.events import Ready


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
    ) -> None:
        self._template = template
        self._tool_format = tool_format
        self._reasoning_parser = reasoning_parser
        self._think_end_id = think_end_id
        self._admission = admission
        self._workers = workers

    async def render(self, conversation: Conversation, ignored: IgnoredFields) -> str:
        """Render the prompt of a conversation, with its special tokens.

        If the template does not render tools, they are described in the messages.

        Raises ApiError 400 if the model has no chat template, or if the template fails.
        """
        if self._template is None:
            raise no_template("its directory has no chat template, and its type has no built-in one")
        if not self._template.reads_tools:
            conversation = with_tools_as_text(conversation, self._tool_format.syntax)
        return await self._workers.run(self._template.render, conversation, ignored)

    async def admit(
        self,
        options: GenerationOptions,
        conversation: Conversation,
        tool_use: ToolUse,
        ready: Ready,
        ignored: IgnoredFields,
    ) -> tuple[Admitted, MessageShape]:
        """Render, encode and check a conversation.

        Fields without effect are recorded in `ignored`. Raises ApiError if the conversation cannot be rendered, or if
        the request cannot be admitted.
        """
        self._admission.named(options.model, ready.model)
        begun = monotonic()
        prompt = await self.render(conversation, ignored)
        rendered = Stage("render", begun, monotonic())
        shape = self._shape(tool_use, prompt)
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
            stages=(rendered,),
        )
        return admitted, shape

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
