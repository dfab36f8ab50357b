"""`tandem swap`: the request that it sends, and its exit codes."""

import json
from pathlib import Path

import pytest

from tandem.frontend.cli.main import main
from tests.fakes.http_server import Answer, scripted_server

DONE = Answer(200, json.dumps({"active_path": "/m/b", "weight_version": "2", "path": "/m/b"}).encode())


def test_a_swap_sends_an_absolute_path_and_names_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with scripted_server(DONE) as server:
        flags = ["--running", "abort", "--grace", "3", "--weight-version", "step-2"]
        assert main(["swap", "b", "--url", server.url, *flags]) == 0
    ((path, body),) = server.requests
    expected = {"path": str(tmp_path / "b"), "running": "abort", "grace": 3, "activate": True, "version": "step-2"}
    assert (path, json.loads(body)) == ("/admin/swap", expected)
    assert capsys.readouterr() == ("/m/b serves as version 2\n", "")


def test_a_checkpoint_may_only_be_staged(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(DONE) as server:
        assert main(["swap", "/m/b", "--url", server.url, "--stage-only"]) == 0
    fields = json.loads(server.requests[0][1])
    assert fields["activate"] is False and "version" not in fields
    assert capsys.readouterr() == ("/m/b is staged\n", "")


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_a_refusal_is_shown_and_exits_with_1(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Answer(status, json.dumps({"error": {"message": "rms_norm_eps is 0.5"}}).encode())
    with scripted_server(refusal) as server:
        assert main(["swap", "/m/b", "--url", server.url]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("tandem: ") and "rms_norm_eps is 0.5" in error


@pytest.mark.parametrize(
    ("path", "is_name"),
    [("Qwen/Qwen3-0.6B", True), ("step/7", False), ("Qwen3-0.6B", False), ("./a/b", False), ("/m/b", False)],
)
def test_the_refusal_of_a_name_on_the_hub_asks_for_a_folder(
    path: str, is_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step" / "7").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refusal = Answer(404, json.dumps({"error": {"message": "it does not exist"}}).encode())
    with scripted_server(refusal) as server:
        assert main(["swap", path, "--url", server.url]) == 1
    assert ("names on the hub are not taken" in capsys.readouterr().err) == is_name
