"""How the log names the parsers of a model's outputs, and what decided on them."""

import logging
from pathlib import Path

import pytest

from tandem.frontend.chat.chat import Parsers
from tandem.frontend.chat.template_probes import TemplateFacts
from tandem.frontend.config import FrontendConfig
from tandem.frontend.generation.output_tags import TagToken
from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS
from tests.frontend.conftest import RunningServer, until
from tests.support.chat_routes import RAW
from tests.support.published_templates import PUBLISHED

THINK_TOKENS = {5: TagToken("<think>"), 6: TagToken("</think>")}
WRITTEN = TemplateFacts("qwen3_coder", THINK_TAGS)


@pytest.mark.parametrize(
    ("parsers", "facts", "tools", "reasoning"),
    [
        (Parsers("auto", "auto", ["qwen3_5"], {}), WRITTEN, "qwen3_coder (chat template)", "think (chat template)"),
        (Parsers("hermes", "none", ["qwen3_5"], {}), WRITTEN, "hermes (--tool-parser)", "none"),
        (Parsers("auto", "mistral", [], {}), WRITTEN, "qwen3_coder (chat template)", "mistral (--reasoning-parser)"),
        (Parsers("auto", "auto", ["qwen3"], {}), TemplateFacts(), "hermes (model type)", "none"),
        (
            Parsers("auto", "auto", ["qwen3"], THINK_TOKENS),
            TemplateFacts(),
            "hermes (model type)",
            "think (vocabulary)",
        ),
        (
            Parsers("auto", "auto", ["unheard-of"], {}),
            TemplateFacts(think_tags=MISTRAL_THINK_TAGS),
            "json (default)",
            "mistral (chat template)",
        ),
    ],
)
def test_summary_has_the_chosen_parsers_and_what_decided(
    parsers: Parsers, facts: TemplateFacts, tools: str, reasoning: str
) -> None:
    assert parsers.summary(facts) == f"tool calls: {tools}; reasoning: {reasoning}"


def test_a_frontend_logs_its_parsers_at_the_start(
    ipc_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RAW.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED["qwen3_5"]["default"])
    caplog.set_level(logging.INFO, "tandem.frontend.chat.chat")
    server = RunningServer(FrontendConfig(f"ipc://{ipc_dir}/engine", tmp_path, drain_timeout=1.0)).start()
    try:
        line = "tool calls: qwen3_coder (chat template); reasoning: think (chat template)"
        until(lambda: line in caplog.messages, caplog.text)
    finally:
        server.stop()
