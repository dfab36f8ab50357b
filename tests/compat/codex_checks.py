"""Codex CLI, `codex exec`, over the Responses API."""

import json
from pathlib import Path

from checks import FORECAST, FORECAST_VALUE, base_url, expect, run
from cli import SAID, SHELL_COMMAND, events, play, program, project, ran

SETTINGS = f"""
model = "agent-model"
model_provider = "tandem"
model_context_window = 131072
check_for_update_on_startup = false
[model_providers.tandem]
name = "Tandem"
base_url = "{base_url()}/v1"
wire_api = "responses"
[analytics]
enabled = false
[otel]
exporter = "none"
"""
WORK = project()
HOME = WORK / "settings"
FLAGS = ("--skip-git-repo-check", "--json")


def codex(*arguments: str) -> list[dict]:
    found = events(ran([program("codex"), "exec", *arguments], WORK, CODEX_HOME=str(HOME)))
    errors = [event for event in found if event["type"] in ("error", "turn.failed")]
    expect(not errors, errors)
    return found


def items(found: list[dict], kind: str) -> list[dict]:
    return [event["item"] for event in found if event["type"] == "item.completed" and event["item"]["type"] == kind]


def first_turn() -> None:
    found = codex("--sandbox", "danger-full-access", *FLAGS, "Say hello (ask-1)")
    expect(items(found, "agent_message")[-1]["text"] == "I heard ask-1.", found)
    expect(items(found, "reasoning") or found[-1]["usage"]["output_tokens"] > 0, found)


def second_turn() -> None:
    found = codex("resume", "--last", *FLAGS, "Say hello again (ask-2)")
    expect(items(found, "agent_message")[-1]["text"] == "I heard ask-1 ask-2.", found)


def tool() -> None:
    question = f"Say hello with the shell (ask-3)\n{play('exec_command', cmd=SHELL_COMMAND)}"
    found = codex("--sandbox", "danger-full-access", *FLAGS, question)
    (call,) = items(found, "command_execution")
    expect(call["exit_code"] == 0 and SAID in call["aggregated_output"], call)
    expect((WORK / "said.txt").read_text().strip() == SAID, "the command ran")
    final = items(found, "agent_message")[-1]["text"]
    expect("The tool said" in final and SAID in final, found)


def streamed_turn() -> None:
    """Codex asks for streams alone: its turn ends with the usage of the stream's last event."""
    found = codex("--sandbox", "danger-full-access", *FLAGS, "Say hello (ask-4)")
    expect(found[-1]["type"] == "turn.completed" and found[-1]["usage"]["input_tokens"] > 1000, found[-1])


def output_schema() -> None:
    schema = Path(WORK / "schema.json")
    schema.write_text(json.dumps(FORECAST))
    found = codex("--sandbox", "danger-full-access", *FLAGS, "--output-schema", str(schema), "The weather? (ask-5)")
    expect(json.loads(items(found, "agent_message")[-1]["text"]) == FORECAST_VALUE, found)


HOME.mkdir()
(HOME / "config.toml").write_text(SETTINGS)
run(
    first_turn=(first_turn,), second_turn=(second_turn,), tool=(tool,), streaming=(streamed_turn,),
    structured=(output_schema,),
)  # fmt: skip
