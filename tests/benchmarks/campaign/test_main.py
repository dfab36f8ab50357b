"""The command that runs a campaign."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.campaign.__main__ import main
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tests.support.serving import until


def test_the_plan_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "faults: llama-3.2-1b, 0 s to start"
    assert lines[1].split()[:3] == ["faults_1b", "90", "s"]
    assert "--only kill-engine stop-engine" in lines[1]
    assert lines[2] == "1.5 minutes in all, starts included"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out DIR says where"),
        (["--list", "--only", "nothing"], "--only nothing: the plan has"),
        (["--list", "--plan", "{missing}"], "No such file or directory"),
        (["--list", "--plan", "{wrong}"], "wrong.toml: "),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.toml").write_text("group = []")
    places = {"missing": tmp_path / "missing.toml", "wrong": tmp_path / "wrong.toml"}
    with pytest.raises(SystemExit) as caught:
        main([word.format_map(places) for word in arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_campaign_measures_a_step_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[group]]\nname = "folders"\nshape = "llama-3.2-1b"\nserve = false\n[[group.measurement]]\nname = "listing"\n'
        'seconds = 60\ncommand = "json.tool {folder}/config.json"\n'
    )
    assert main(["--plan", str(plan), "--out", str(tmp_path / "out")]) == 0
    assert '"model_type": "llama"' in (tmp_path / "out" / "listing.log").read_text()
    assert main(["--plan", str(plan), "--out", str(tmp_path / "out")]) == 0, "all is done"
    output = capsys.readouterr().out
    assert output.count("listing: done") == 1
    assert output.endswith(
        f"all of that is done in {tmp_path / 'out' / 'runs.jsonl'}; give another --out to measure it again\n"
    )


def test_a_group_gets_the_tokenizer_that_it_names(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[group]]\nname = "folders"\nshape = "llama-3.2-1b"\ntokenizer = "default-model"\nserve = false\n'
        '[[group.measurement]]\nname = "config"\nseconds = 60\ncommand = "json.tool {folder}/config.json"\n'
        '[[group.measurement]]\nname = "tokenizer"\nseconds = 60\ncommand = "json.tool {folder}/tokenizer.json"\n'
    )
    assert main(["--plan", str(plan), "--out", str(tmp_path)]) == 0
    config = json.loads((tmp_path / "config.log").read_text())
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (128_256, 1, 2)
    assert json.loads((tmp_path / "tokenizer.log").read_text()) == json.loads(
        (DEFAULT_MODEL / "tokenizer.json").read_text()
    )


def test_a_campaign_that_is_told_to_end_leaves_nothing_running(tmp_path: Path) -> None:
    plan, log = tmp_path / "plan.toml", tmp_path / "out" / "waiting.log"
    plan.write_text(
        '[[group]]\nname = "alone"\n[[group.measurement]]\nname = "waiting"\nseconds = 600\n'
        "command = \"timeit -n 1 -r 1 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\"\n"
    )
    command = [sys.executable, "-m", "benchmarks.campaign", "--plan", str(plan), "--out", str(log.parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as campaign:
        until(lambda: log.exists() and log.read_text().endswith("\n"), "the measurement")
        campaign.terminate()
        assert campaign.wait() == 143
    assert not psutil.pid_exists(int(log.read_text()))
