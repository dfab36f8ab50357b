"""Swaps of weights under load, with real processes: no stream mixes weights unless it was asked to."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.constant_model import MODEL, write_constant_model
from tests.support.serving import GUARD_SECONDS, Serving, until

TOKENS = (300, 301)
LENGTH = 40
STAGER = "tandem.engine_core.startup.stage_checkpoint"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two checkpoints, whose answers have no token in common."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, token in zip("ab", TOKENS, strict=True):
        write_constant_model(folder / name, token)
    return folder


@pytest.fixture(scope="module")
def serving(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("serving") / "log"
    flags = ("--enable-weight-updates", "--swap-root", str(root), "--threads", "1", "--frontends", "1")
    # Two requests with two choices each: one choice waits for a row.
    with Serving(log, "--model", str(root / "a"), *flags, "--max-rows", "3") as found:
        yield found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the text of each checkpoint's token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return {name: tokenizer.decode([token] * 2) for name, token in zip("ab", TOKENS, strict=True)}


class Load:
    """Threads that ask for completions one after the other, until the end of the context."""

    def __init__(self, serving: Serving, threads: int = 2) -> None:
        self.serving = serving
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.answers) >= len(self._threads), "the first answers")
        return self

    def __exit__(self, *_: object) -> None:
        before = len(self.answers)
        until(lambda: len(self.answers) >= before + len(self._threads), "answers after the last swap")
        self._stop.set()
        for thread in self._threads:
            thread.join(GUARD_SECONDS)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.answers.append(complete(self.serving, f"Prompt of thread {number}. " * 8))


def complete(serving: Serving, prompt: str = "What is this?") -> tuple[int, dict[str, Any]]:
    body = {"model": "a", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "n": 2}
    return serving.post("/v1/completions", body | {"return_token_ids": True})


def swap(serving: Serving, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    return serving.post("/admin/swap", {"path": path, **fields})


def active(serving: Serving) -> dict[str, Any]:
    status, text = serving.get("/admin/swap")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


def other(serving: Serving) -> str:
    return "b" if active(serving)["active_path"].endswith("/a") else "a"


def stage(serving: Serving) -> str:
    """Stage the other checkpoint; return its name.

    The process that stages has a lower priority: under the load of these tests it would take many times as long.
    """
    name = other(serving)
    status, answer = swap(serving, name, activate=False)
    assert status == 200, answer
    return name


def check_unmixed(answer: dict[str, Any], texts: dict[str, str]) -> str:
    """Check that one checkpoint computed all choices of an answer; return its name."""
    given = [choice["text"] for choice in answer["choices"]]
    found = [name for name, sample in texts.items() if any(sample.strip() in text for text in given)]
    assert len(found) == 1 and len(given) == 2, given
    assert "weight_versions" not in answer["usage"]
    return found[0]


def check_streams(load: Load, computed: dict[str, str], texts: dict[str, str], statuses: set[int]) -> None:
    """Check that each answer has tokens of one checkpoint. computed: name of the checkpoint by version."""
    assert {status for status, _ in load.answers} <= statuses
    for status, answer in load.answers:
        if status == 200:
            assert computed[answer["usage"]["weight_version"]] == check_unmixed(answer, texts)
        else:
            assert answer["error"]["code"] == "weights_changed"


def computed_by(serving: Serving) -> dict[str, str]:
    """Return the name of the active checkpoint by its version."""
    found = active(serving)
    return {found["weight_version"]: found["active_path"][-1]}


def test_aborted_streams_do_not_mix_weights(serving: Serving, texts: dict[str, str]) -> None:
    before, name = computed_by(serving), stage(serving)
    with Load(serving) as load:
        status, answer = swap(serving, name, running="abort")
        assert status == 200, answer
    check_streams(load, before | computed_by(serving), texts, {200, 503})


def test_the_command_waits_for_streams_and_a_restarted_engine_has_the_weights(
    serving: Serving, root: Path, texts: dict[str, str]
) -> None:
    before, name = computed_by(serving), stage(serving)
    command = [str(Path(sys.executable).with_name("tandem")), "swap", str(root / name), "--url", serving.url]
    with Load(serving) as load:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
    after = computed_by(serving)
    assert after.keys() != before.keys() and list(after.values()) == [name]
    check_streams(load, before | after, texts, {200})
    engine = serving.engine
    engine.kill()
    engine.wait(GUARD_SECONDS)
    answer = until(lambda: (found := complete(serving))[0] == 200 and found[1], "an answer of the new engine")
    assert {answer["usage"]["weight_version"]: check_unmixed(answer, texts)} == after


@pytest.mark.slow
def test_restarted_streams_report_their_spans(serving: Serving, texts: dict[str, str]) -> None:
    name = stage(serving)
    with Load(serving) as load:
        assert swap(serving, name, running="restart")[0] == 200
    assert {status for status, _ in load.answers} == {200}
    for _, answer in load.answers:
        spans = answer["usage"].get("weight_versions")
        if spans is None:
            check_unmixed(answer, texts)
            continue
        for choice in range(2):
            own = [span for span in spans if span["choice"] == choice]
            assert [span["start"] for span in own] == [0, *(span["end"] for span in own[:-1])]
            assert own[-1]["end"] == LENGTH
        assert spans[-1]["version"] == answer["usage"]["weight_version"]


def test_a_checkpoint_that_does_not_fit_is_refused_while_serving_continues(serving: Serving, root: Path) -> None:
    before = active(serving)
    shutil.copytree(root / "a", root / "broken")
    fields = json.loads((root / "broken" / "config.json").read_text())
    (root / "broken" / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 0.5}))
    status, answer = swap(serving, "broken")
    assert (status, answer["error"]["code"]) == (409, "swap_failed")
    assert "rms_norm_eps" in answer["error"]["message"] and "0.5" in answer["error"]["message"]
    assert active(serving) == before | {"problem": answer["error"]["message"]}
    assert complete(serving)[0] == 200


def test_a_kill_during_staging_leaves_the_old_weights(serving: Serving) -> None:
    before = active(serving)
    found: list[tuple[int, dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: found.append(swap(serving, other(serving))))
    thread.start()
    for child in until(lambda: serving.children(STAGER, recursive=True), "the process that stages"):
        child.send_signal(signal.SIGKILL)
    thread.join(GUARD_SECONDS)
    ((status, answer),) = found
    assert status == 409 and "-9" in answer["error"]["message"]
    assert active(serving)["active_path"] == before["active_path"]
    assert complete(serving)[0] == 200


def test_paths_outside_of_the_root_are_refused(serving: Serving, root: Path) -> None:
    for path, status in (("..", 400), (str(MODEL), 400), ("/etc", 400), ("nothing", 404)):
        assert swap(serving, path)[0] == status, path
    (root / "empty").mkdir()
    assert swap(serving, "empty")[0] == 400
    (root / "linked").mkdir()
    (root / "linked" / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    assert swap(serving, "linked")[0] == 400


def test_every_api_reports_the_version(serving: Serving) -> None:
    version = active(serving)["weight_version"]
    messages = [{"role": "user", "content": "What is this?"}]
    for path, body in {
        "/v1/completions": {"prompt": "What is this?", "max_tokens": 4},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": "What is this?", "max_output_tokens": 16},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
    }.items():
        status, answer = serving.post(path, {"model": "a", "temperature": 0, **body})
        assert (status, answer["usage"].get("weight_version")) == (200, version), (path, answer)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_swaps(serving: Serving, texts: dict[str, str]) -> None:
    modes = ("wait", "abort")
    for number in range(200):
        before, name = computed_by(serving), stage(serving)
        with Load(serving) as load:
            assert swap(serving, name, running=modes[number % 2])[0] == 200
        check_streams(load, before | computed_by(serving), texts, {200, 503} if number % 2 else {200})
    state = json.loads(serving.get("/admin/scheduler")[1])
    assert state["pages"]["used"] == 0 and state["sequences"] == []
