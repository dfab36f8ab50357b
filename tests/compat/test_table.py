"""The table of clients: its cells, its pins and the turns that the scripted engine plays."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat import checks
from tests.compat.agent_server import answer
from tests.compat.checks import FORECAST_VALUE
from tests.compat.clients import Row
from tests.compat.installed import HERE, Installed
from tests.compat.pins import CLIENTS

TOOLS = "<|im_start|>system\n<tools>\n{}\n</tools><|im_end|>\n"
CALL = '{"name": "Bash", "arguments": {"command": "ls"}}'


def row(*found: tuple[str, bool, str]) -> Row:
    return Row(CLIENTS[0], [{"column": c, "check": "turn", "ok": ok, "detail": detail} for c, ok, detail in found])


def test_a_cell_is_ok_refused_with_its_message_or_not_offered() -> None:
    mixed = row(("tool", True, ""), ("tool", False, "422 | no\nfield"), ("first turn", True, ""), ("more", True, ""))
    assert mixed.cell("first turn") == "ok"
    assert mixed.cell("tool") == "refused: turn: 422 / no field"
    assert mixed.cell("structured") == "not offered"
    assert mixed.cell("more") == "1 ok"


def test_a_script_that_breaks_makes_every_cell_refused() -> None:
    broken = row(("first turn", True, ""), ("the script", False, "exit 1"))
    assert {broken.cell(column) for column in ("first turn", "tool")} == {"refused: turn: exit 1"}


def test_every_client_has_one_exact_version_and_a_script() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        pinned = r"[^=]+==\d[\w.]+" if not client.from_npm else r"@?[^@]+@\d[\w.]+"
        assert all(re.fullmatch(pinned, package) for package in client.packages)
        assert (HERE / client.script).is_file()
        assert client.packages[0].endswith(client.version)


def test_clients_see_none_of_the_callers_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for client in CLIENTS:
        environ = Installed(client, tmp_path).environ
        assert "OPENAI_API_KEY" not in environ
        assert environ["HOME"] == str(tmp_path / "home")


@pytest.mark.parametrize(
    ("prompt", "constrained", "said"),
    [
        ("Hi ask-1 then ask-2", False, "I heard ask-1 ask-2."), (f"Hi ask-1\nPLAY {CALL}", False, "I heard ask-1."),
        (f"{TOOLS}ask-1\nPLAY {CALL}<|im_end|>\n", False, f"<tool_call>\n{CALL}\n</tool_call>"),
        (f"{TOOLS}ask-1\nPLAY {CALL}\n<tool_response>\nx\n</tool_response>", False, "The tool said x. I heard ask-1."),
        (f"{TOOLS}ask-1\nPLAY {CALL}", True, json.dumps(FORECAST_VALUE)),
    ],
)  # fmt: skip
def test_the_engine_plays_a_call_and_then_repeats_its_result(prompt: str, constrained: bool, said: str) -> None:
    assert answer(prompt, constrained).endswith(said)


def test_each_check_reports_its_column_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fine() -> None: ...

    def broken() -> None:
        checks.expect(False, "no answer")

    both: tuple[Callable[[], Any], ...] = (fine, broken)
    checks.run(first_turn=both[:1], tool=both)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["column"], line["check"], line["ok"], line["detail"]) for line in found] == [
        ("first turn", "fine", True, ""), ("tool", "fine", True, ""),
        ("tool", "broken", False, "AssertionError: no answer"),
    ]  # fmt: skip
