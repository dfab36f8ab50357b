"""Load the chat template of a model and prepare conversations for it."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.frontend.chat.render_frames import RenderRequest, Templates, json_frame
from tandem.frontend.chat.template_sandbox import RenderError, SandboxedTemplates
from tandem.frontend.errors import ApiError, malformed, unsupported_field
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.model_folder import (
    TemplateFileError,
    TemplateSource,
    find_templates,
    read_settings,
    read_template,
    special_tokens,
)

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parents[1] / "templates"

MODEL_TEMPLATES = {
    "llama": ("llama3", "<|start_header_id|>"),
    "qwen3": ("qwen3", "<|im_start|>"),
    "qwen3_moe": ("qwen3", "<|im_start|>"),
    # Gemma 2 has the same turns as Gemma 3.
    "gemma2": ("gemma3", "<start_of_turn>"),
    "gemma3": ("gemma3", "<start_of_turn>"),
    "gemma3_text": ("gemma3", "<start_of_turn>"),
    "mistral": ("mistral", "[INST]"),
    "ministral3": ("mistral", "[INST]"),
}
"""Built-in templates for checkpoints without one, by `model_type`, with a token that the vocabulary must contain.

The token distinguishes generations of models that share a type.
"""

_CONTINUE_MARK = "CONTINUE_THE_MESSAGE_FROM_HERE "
_THINKING_VARIABLES = ("enable_thinking", "thinking")


class ChatTemplateError(Exception):
    """A chat template cannot be read or compiled.

    The message names the template and the reason.
    """


class ChatTemplate:
    """Templates of one model and the variables they get for a conversation.

    A separate process renders them (`render_worker`), because a template is a program.
    """

    def __init__(self, source: TemplateSource, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens

    @property
    def templates(self) -> Templates:
        """Return the templates for the render process."""
        return Templates(self.source.texts, dict(self._special_tokens))

    def compile(self) -> None:
        """Compile all templates, to report errors before the first request.

        Raises ChatTemplateError if a template cannot be compiled.
        """
        sandbox = SandboxedTemplates()
        for name, text in self.source.texts.items():
            try:
                sandbox.compile_template(text)
            except RenderError as failure:
                raise ChatTemplateError(
                    f"the chat template {name!r} ({self.source.origin}) cannot be used: {failure}; correct it, or give "
                    "another with --chat-template FILE"
                ) from None

    def name_for(self, conversation: Conversation) -> str:
        """Return the name of the template that renders a conversation.

        Raises ApiError 400 if the model lacks it.
        """
        name = self._name(bool(conversation.tools))
        if name not in self.source.texts:
            raise no_template(f"the model's templates are {sorted(self.source.texts)}, without one named 'default'")
        return name

    def request(self, name: str, conversation: Conversation, ignored: IgnoredFields) -> RenderRequest:
        """Build the request to render a conversation with the template `name`.

        Reasoning fields that the template does not read are recorded as ignored.

        Raises ApiError 400 if there are `documents` and the template does not read them.
        """
        text = self.source.texts[name]
        if conversation.documents and "documents" not in text:
            raise unsupported_field("{param} is not supported: the model's chat template does not read it", "documents")
        messages = list(conversation.messages)
        if conversation.continue_final_message:
            messages[-1] = _with_mark(messages[-1])
        variables = {
            **conversation.template_kwargs,
            **_reasoning_variables(conversation, text, ignored),
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return RenderRequest(name, variables)

    def probe_frame(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any], name: str | None = None
    ) -> bytes:
        """Encode the request to render a probe, by default with the template for tools."""
        given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables, "messages": messages}
        return json_frame(RenderRequest(name or self._name(bool(given["tools"])), given))

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self.source.texts else "default"

    def request_frame(self, name: str, conversation: Conversation, ignored: IgnoredFields) -> bytes:
        """Encode the request to render a conversation.

        Raises ApiError 400 like `request`, and if the conversation cannot be encoded.
        """
        request = self.request(name, conversation, ignored)
        try:
            return json_frame(request)
        except (RecursionError, UnicodeEncodeError) as error:
            raise self.failed(f"its input cannot be passed on: {error}") from None

    def prompt(self, conversation: Conversation, rendered: str) -> str:
        """Return the prompt of a conversation, given the template's output.

        Raises ApiError 400 if the last message cannot be continued.
        """
        return _cut_at_mark(rendered) if conversation.continue_final_message else rendered

    def failed(self, reason: str) -> ApiError:
        """Return the ApiError 400 for a conversation that the template rejected or failed to render."""
        return malformed(f"the chat template ({self.source.origin}) failed: {reason}", "messages")


def no_template(reason: str) -> ApiError:
    """Return the ApiError 400 for a model without a usable chat template."""
    message = f"this model cannot chat: {reason}; start the server with --chat-template FILE"
    return ApiError(400, message, "messages", "no_chat_template")


def load_chat_template(model_dir: Path, file: Path | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the chat template of a model, or return None if it has none.

    The template is read from `file`, else from the checkpoint, else it is the built-in one of the `model_type`. Raises
    ChatTemplateError if the file cannot be read or the template cannot be compiled.
    """
    try:
        tokens = special_tokens(model_dir)
        if file is not None:
            source: TemplateSource | None = TemplateSource({"default": read_template(file)}, f"--chat-template {file}")
        else:
            source = find_templates(model_dir) or _find_built_in(model_dir, tokenizer)
    except TemplateFileError as error:
        raise ChatTemplateError(str(error)) from None
    if source is None:
        logger.info("the model has no chat template, so it cannot chat; --chat-template FILE gives it one")
        return None
    template = ChatTemplate(source, tokens)
    template.compile()
    return template


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the `model_type` of config.json and of its `text_config`, if present."""
    found = [fields.get("model_type") for fields in (config, config.get("text_config")) if isinstance(fields, dict)]
    return [kind for kind in found if isinstance(kind, str)]


def _find_built_in(model_dir: Path, tokenizer: Tokenizer) -> TemplateSource | None:
    for kind in model_types(read_settings(model_dir / "config.json")):
        name, token = MODEL_TEMPLATES.get(kind, ("", ""))
        if name and tokenizer.token_id(token) is not None:
            return TemplateSource({"default": read_template(TEMPLATES / f"{name}.jinja")}, f"built in for {kind}")
    return None


def _reasoning_variables(conversation: Conversation, template: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Convert the reasoning fields to template variables.

    Fields that the template does not read are recorded as ignored.
    """
    variables: dict[str, Any] = {}
    effort, thinking = conversation.reasoning_effort, conversation.thinking
    if effort is not None:
        if "reasoning_effort" in template:
            variables["reasoning_effort"] = effort
        elif conversation.effort_switches and "enable_thinking" in template:
            variables["enable_thinking"] = effort != "none"
        else:
            ignored.add(conversation.effort_field)
    if thinking is not None:
        # DeepSeek calls the variable `thinking`.
        name = next((name for name in _THINKING_VARIABLES if re.search(rf"\b{name}\b", template)), None)
        if name is None:
            ignored.add(conversation.thinking_field)
        else:
            variables[name] = thinking
    return variables


def _with_mark(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise malformed("'continue_final_message' needs a last message with 'content'", "continue_final_message")
    return {**message, "content": content + _CONTINUE_MARK}


def _cut_at_mark(rendered: str) -> str:
    """Truncate the prompt after the last message's content.

    If the template trimmed the space at the end of the mark, it trims messages; then the prompt is trimmed, too.
    """
    mark = _CONTINUE_MARK.rstrip()
    at = rendered.rfind(mark)
    if at < 0:
        raise malformed(
            "'continue_final_message': the chat template leaves the last message out", "continue_final_message"
        )
    kept = rendered[at:].startswith(_CONTINUE_MARK)
    return rendered[:at] if kept else rendered[:at].rstrip()
