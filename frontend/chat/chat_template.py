"""A conversation as the text that the model was trained on: which template, and what it is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Template

from tandem.frontend.chat.template_sandbox import RenderError, SandboxedTemplates
from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.request.conversation import Conversation

TEMPLATES = Path(__file__).parents[1] / "templates"

MODEL_TEMPLATES = {
    "llama": ("llama3", "<|start_header_id|>"),
    "qwen3": ("qwen3", "<|im_start|>"),
    "qwen3_moe": ("qwen3", "<|im_start|>"),
    "gemma3": ("gemma3", "<start_of_turn>"),
    "gemma3_text": ("gemma3", "<start_of_turn>"),
    "mistral": ("mistral", "[INST]"),
}
"""Our own templates by the `model_type` of a checkpoint that brings none, each with a token that its vocabulary has
if the template is meant for it: models of other generations have the same type."""

_CONTINUE_MARK = "CONTINUE_THE_MESSAGE_FROM_HERE "
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(Exception):
    """What `--chat-template` names is no template; the text says why."""


class TemplateSource(msgspec.Struct, frozen=True):
    """The text of templates by name, `default` and perhaps `tool_use`, and where they come from."""

    texts: dict[str, str]
    origin: str


class ChatTemplate:
    """Renders conversations. Costs time and is safe to call from any thread, one render at a time."""

    def __init__(
        self, source: TemplateSource, special_tokens: Mapping[str, Any], sandbox: SandboxedTemplates | None = None
    ) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._sandbox = sandbox or SandboxedTemplates()
        self._compiled: dict[str, Template] = {}

    def mentions(self, text: str) -> bool:
        """Whether the source of any of the templates holds this text."""
        return any(text in source for source in self.source.texts.values())

    def render(self, conversation: Conversation) -> str:
        """The prompt. Raises ApiError 400 where the template refuses the messages, fails or has to be stopped."""
        name = "tool_use" if conversation.tools and "tool_use" in self.source.texts else "default"
        text = self.source.texts.get(name)
        if text is None:
            raise no_template(f"the model's templates are {sorted(self.source.texts)}; none is the default")
        messages = [_adapted(message, text) for message in conversation.messages]
        if conversation.continue_final_message:
            _mark(messages[-1])
        variables = {
            **self._special_tokens,
            **conversation.template_kwargs,
            **_reasoning(conversation, text),
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            rendered = self._sandbox.rendered(self._template(name, text), variables)
        except RenderError as failure:
            raise malformed(f"the chat template ({self.source.origin}) failed: {failure}", "messages") from None
        return _up_to_mark(rendered) if conversation.continue_final_message else rendered

    def _template(self, name: str, text: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = self._sandbox.compiled(text)
        return self._compiled[name]


def no_template(reason: str) -> ApiError:
    """400 for a chat with a model that has no chat template."""
    message = f"this model cannot chat: {reason}; start the server with --chat-template FILE"
    return ApiError(400, message, "messages", "no_chat_template")


def load_chat_template(model_dir: Path, file: Path | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template given, or the checkpoint's, or ours for its `model_type`, or none.

    Raises ChatTemplateError for a file that cannot be read, and for one given that is no template.
    """
    config = _read_json(model_dir / "tokenizer_config.json")
    if file is not None:
        source: TemplateSource | None = _given(file)
    else:
        source = _of_checkpoint(model_dir, config) or _of_model_type(model_dir, tokenizer)
    return None if source is None else ChatTemplate(source, special_tokens(model_dir, config))


def special_tokens(model_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The names that templates know special tokens by, and their texts."""
    found: dict[str, Any] = {}
    for fields in (_read_json(model_dir / "special_tokens_map.json"), config):
        for name in _SPECIAL_TOKENS:
            if (text := _token_text(fields.get(name))) is not None:
                found[name] = text
    return found


def model_type(model_dir: Path) -> str:
    """The checkpoint's `model_type`, or "" where nothing says it."""
    return str(_read_json(model_dir / "config.json").get("model_type", ""))


def _token_text(value: object) -> str | None:
    """A token is a string, or an object with its `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _given(file: Path) -> TemplateSource:
    source = TemplateSource({"default": _read_text(file)}, str(file))
    try:
        SandboxedTemplates().compiled(source.texts["default"])
    except RenderError as failure:
        raise ChatTemplateError(f"--chat-template {file}: {failure}") from None
    return source


def _of_checkpoint(model_dir: Path, config: Mapping[str, Any]) -> TemplateSource | None:
    """`chat_template.jinja` and what lies in `additional_chat_templates`, else what tokenizer_config.json holds."""
    texts: dict[str, str] = {}
    if (path := model_dir / "chat_template.jinja").is_file():
        texts["default"] = _read_text(path)
        for other in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
            texts[other.stem] = _read_text(other)
        return TemplateSource(texts, path.name)
    template = config.get("chat_template", _read_json(model_dir / "chat_template.json").get("chat_template"))
    if isinstance(template, str):
        texts["default"] = template
    elif isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                texts[str(entry.get("name"))] = entry["template"]
    return TemplateSource(texts, "tokenizer_config.json") if texts else None


def _of_model_type(model_dir: Path, tokenizer: Tokenizer) -> TemplateSource | None:
    kind = model_type(model_dir)
    name, token = MODEL_TEMPLATES.get(kind, ("", ""))
    if not name or tokenizer.token_id(token) is None:
        return None
    path = TEMPLATES / f"{name}.jinja"
    return TemplateSource({"default": _read_text(path)}, f"built in for {kind}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"the chat template {path} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """An object of the model folder; empty where it is not there or holds something else."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _adapted(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Roles that a template does not know become those that mean the same."""
    role = message["role"]
    if role == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return {**message, "role": "tool"} if role == "function" else {**message}


def _reasoning(conversation: Conversation, template: str) -> dict[str, Any]:
    """What `reasoning_effort` becomes. Raises ApiError 422 for a template that has no use for it."""
    effort = conversation.reasoning_effort
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    raise unsupported(
        "'reasoning_effort' is not supported: the model's chat template does not read it", "reasoning_effort"
    )


def _mark(message: dict[str, Any]) -> None:
    if not isinstance(message.get("content"), str):
        raise malformed("'continue_final_message' needs a last message with 'content'", "continue_final_message")
    message["content"] += _CONTINUE_MARK


def _up_to_mark(rendered: str) -> str:
    """The text up to where the last message ended. A template that trims messages has trimmed the mark's blank, too,
    and then the blanks ahead of it are none of the prompt's."""
    mark = _CONTINUE_MARK.rstrip()
    at = rendered.rfind(mark)
    if at < 0:
        raise malformed(
            "'continue_final_message': the chat template leaves the last message out", "continue_final_message"
        )
    kept = rendered[at:].startswith(_CONTINUE_MARK)
    return rendered[:at] if kept else rendered[:at].rstrip()
