"""From a conversation to an admitted request, and to what its outputs are to be read for."""

from msgspec import structs

from tandem.frontend.chat.chat_template import ChatTemplate, no_template
from tandem.frontend.chat.message import MessageShape
from tandem.frontend.chat.reasoning import opens_thoughts
from tandem.frontend.chat.tool_formats import ToolFormat
from tandem.frontend.generation.admission import Admission, Admitted, check_model
from tandem.frontend.grammar.constraints import Thoughts
from tandem.frontend.grammar.tags import CLOSE
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers
from tandem.protocol.events import Ready


class Chat:
    """What this server knows of chatting with its model. `close_id` is the token that closes thoughts, if it is one."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tool_format: ToolFormat,
        reasoning_parser: str,
        close_id: int | None,
        admission: Admission,
        workers: Workers,
    ) -> None:
        self._template = template
        self._tool_format = tool_format
        self._reasoning_parser = reasoning_parser
        self._close_id = close_id
        self._admission = admission
        self._workers = workers

    async def render(self, conversation: Conversation) -> str:
        """The prompt of a conversation, special tokens included. Raises ApiError 400 where there is no template."""
        if self._template is None:
            raise no_template("its folder has no chat template, and none is built in for its type")
        return await self._workers.run(self._template.render, conversation)

    async def admit(
        self, options: GenerationOptions, conversation: Conversation, tool_use: ToolUse, ready: Ready
    ) -> tuple[Admitted, MessageShape]:
        """Renders, encodes and checks. Raises ApiError."""
        check_model(options.model, ready.model)
        prompt = await self.render(conversation)
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
            thoughts=_thoughts(shape),
        )
        return admitted, shape

    def _shape(self, tool_use: ToolUse, prompt: str) -> MessageShape:
        return MessageShape(
            tool_use=tool_use,
            tool_format=self._tool_format if tool_use.active else None,
            reasoning=self._thinks,
            thoughts_open=opens_thoughts(prompt),
            close_id=self._close_id,
        )

    @property
    def _thinks(self) -> bool:
        """Whether outputs may begin with thoughts. With "auto" the template tells: it takes care of those of earlier
        turns."""
        if self._reasoning_parser == "auto":
            return self._template is not None and self._template.mentions(CLOSE)
        return self._reasoning_parser == "think"


def _thoughts(shape: MessageShape) -> Thoughts:
    if not shape.reasoning:
        return Thoughts.NONE
    return Thoughts.OPEN if shape.thoughts_open else Thoughts.POSSIBLE
