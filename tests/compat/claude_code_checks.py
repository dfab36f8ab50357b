"""Claude Code, `claude --print`, over the Messages API."""

import json

from checks import FORECAST, FORECAST_VALUE, base_url, expect, run
from cli import SAID, SHELL_COMMAND, events, play, program, project, ran

WORK = project()
SETTINGS = {
    "ANTHROPIC_BASE_URL": base_url(),
    "ANTHROPIC_AUTH_TOKEN": "none",
    "CLAUDE_CONFIG_DIR": str(WORK / "settings"),
}


def claude(*arguments: str) -> str:
    return ran([program("claude"), "--print", *arguments], WORK, **SETTINGS)


def result(output: str) -> dict:
    found = json.loads(output)
    expect(not found["is_error"], found)
    return found


def first_turn() -> None:
    found = result(claude("--output-format", "json", "Say hello (ask-1)"))
    expect(found["result"] == "I heard ask-1.", found)
    expect(found["usage"]["input_tokens"] > 1000 and found["usage"]["output_tokens"] > 0, found)


def second_turn() -> None:
    found = result(claude("--output-format", "json", "--continue", "Say hello again (ask-2)"))
    expect(found["result"] == "I heard ask-1 ask-2.", found)


def tool() -> None:
    question = f"Say hello with the shell (ask-3)\n{play('Bash', command=SHELL_COMMAND, description='Say hello')}"
    found = result(claude("--output-format", "json", "--allowed-tools=Bash", question))
    expect("The tool said" in found["result"] and SAID in found["result"], found)
    expect((WORK / "said.txt").read_text().strip() == SAID, "the command ran")


def partial_messages() -> None:
    flags = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
    found = events(claude(*flags, "Say hello (ask-4)"))
    streamed = [event["event"] for event in found if event["type"] == "stream_event"]
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    expect(text == "I heard ask-4." and len(deltas) > 3, streamed)
    expect("".join(delta.get("thinking", "") for delta in deltas), "thinking")


def json_schema() -> None:
    question = f"The weather? (ask-5)\n{play('StructuredOutput', **FORECAST_VALUE)}"
    found = result(claude("--output-format", "json", "--json-schema", json.dumps(FORECAST), question))
    expect(found["structured_output"] == FORECAST_VALUE, found)


run(
    first_turn=(first_turn,), second_turn=(second_turn,), tool=(tool,), streaming=(partial_messages,),
    structured=(json_schema,),
)  # fmt: skip
