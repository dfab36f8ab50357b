"""What small conversations find out about a chat template."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.frontend.chat.chat_template import TEMPLATES, ChatTemplate
from tandem.frontend.chat.render_frames import HEADER, PROMPT
from tandem.frontend.chat.render_worker import Renderer, answer
from tandem.frontend.chat.template_probes import TemplateFacts, probe_template
from tandem.frontend.chat.template_sandbox import SandboxedTemplates
from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS
from tandem.protocol.model_folder import TemplateSource
from tests.support.published_templates import PUBLISHED

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
END = "\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
CHECKED_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


def calls(written: str) -> str:
    """Make a template that writes calls in this form."""
    return LOOP + "{% for call in m.tool_calls or [] %}{% set f = call.function %}" + written + "{% endfor %}" + END


def facts(**templates: str) -> TemplateFacts:
    template = ChatTemplate(TemplateSource(templates, "a test"), {"bos_token": "<s>", "eos_token": "</s>"})
    renderer = Renderer(template.templates, SandboxedTemplates())

    async def render(messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        reply = answer(renderer, template.probe_frame(messages, variables)[HEADER.size :])
        return reply[HEADER.size :].decode() if HEADER.unpack_from(reply)[1] == PROMPT else ""

    return asyncio.run(probe_template(render))


@pytest.mark.parametrize(
    ("name", "call_format", "think_tags"),
    [("qwen3", "hermes", THINK_TAGS), ("llama3", "llama3_json", None), ("mistral", "mistral", None),
     ("gemma3", "llama3_json", None)],
)  # fmt: skip
def test_built_in_templates_tell_their_format_of_calls(name: str, call_format: str | None, think_tags: object) -> None:
    assert facts(default=(TEMPLATES / f"{name}.jinja").read_text()) == TemplateFacts(call_format, think_tags)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}", "mistral_v11"),
        ("[TOOL_CALLS]{{ f.name + '[CALL_ID]' + call.id + '[ARGS]' + f.arguments }}", "mistral_v11"),
        ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "mistral_v13"),
        ('[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]', "mistral"),
        ('[TOOL_CALLS][{"id": "{{ call.id }}", "name": "{{ f.name }}", "arguments": {}}]', "mistral"),
        ('<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', "hermes"),
        ('<tool_call>{"type": "function", "name": "{{ f.name }}", "arguments": {}}</tool_call>', "hermes"),
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama3_json"),
        ('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "json"),
        (
            "<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
            "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "qwen3_coder",
        ),
        ("<tool_call>\n<function={{ f.name }}>\n</function>\n</tool_call>", None),
        ("<tool_call><function={{ f.name }}>{{ f.arguments | tojson }}</function></tool_call>", None),
        ("<function={{ f.name }}>\n<parameter=zkey>\nzvalue\n</parameter>\n</function>", None),
        ("{{ f.name }}({{ f.arguments }})", None),
        ("{{ raise_exception('no calls') }}", None),
        ("", None),
    ],
)
def test_the_format_of_calls_is_that_which_the_template_writes(written: str, expected: str | None) -> None:
    assert facts(default=calls(written)).call_format == expected


@pytest.mark.parametrize(
    ("name", "call_format", "think_tags"),
    [("qwen3_coder", "qwen3_coder", None), ("qwen3_5", "qwen3_coder", THINK_TAGS), ("qwen3", "hermes", THINK_TAGS),
     ("hermes", "hermes", None), ("chatml", None, None)],
)  # fmt: skip
def test_published_templates_tell_their_format_of_calls(name: str, call_format: str | None, think_tags: object) -> None:
    assert facts(**PUBLISHED[name]) == TemplateFacts(call_format, think_tags)


def test_a_template_for_tools_tells_the_format() -> None:
    written = calls('<tool_call>\n{"name": "{{ f.name }}", "arguments": {}}\n</tool_call>')
    assert facts(default=LOOP + END, tool_use=written).call_format == "hermes"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LOOP + END, None),
        (LOOP + "{# </think> #}" + END, None),
        (LOOP + END + "<think>\n", THINK_TAGS),
        ("Think within [THINK] and [/THINK].\n" + LOOP + END, MISTRAL_THINK_TAGS),
        (LOOP + END + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", THINK_TAGS),
        (LOOP + END + "{% if thinking %}<think>{% endif %}", THINK_TAGS),
        ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}" + END, THINK_TAGS),
        ("{% for m in messages %}{{ m.content.split('[/THINK]')[-1] }}" + END, MISTRAL_THINK_TAGS),
        (LOOP + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}" + END, THINK_TAGS),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}"
            "{% endfor %}{% endif %}" + END,
            MISTRAL_THINK_TAGS,
        ),
        (CHECKED_ROLES + "{% for m in messages %}{{ m.content.split('</think>')[-1] }}" + END, THINK_TAGS),
        ("{{ raise_exception('no') }}</think>", None),
    ],
)
def test_reasoning_is_parsed_if_the_template_writes_or_drops_its_tags(template: str, expected: object) -> None:
    assert facts(default=template).think_tags == expected
