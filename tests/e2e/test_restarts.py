"""Restarts that must not go wrong: a request that kills engines, a broken model folder, a killed supervisor."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.scripted_engine import DEFAULT_MODEL, EARLY_POISON_SEED, POISON_SEED, POISON_TOKENS, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until
from tests.support.stopped_process import is_running
from tests.support.stream_client import Summary, completion, summary

LONG = 1900
"""Tokens of an answer that outlives its engines: at 50 a second, 38 s."""
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that tests may break; what the scripted engine reads of it."""
    path = tmp_path_factory.mktemp("model") / "tandem-default"
    path.mkdir()
    for name in FILES:
        shutil.copy(DEFAULT_MODEL / name, path)
    return path


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ScriptedServing]:
    log = tmp_path_factory.mktemp("restarts") / "log"
    flags = ("--model", str(folder), "--frontends", "1")
    with ScriptedServing(log, *flags, script=Script(tokens_per_second=50.0)) as running:
        yield running


def test_request_that_kills_engines_kills_two_at_most(serving: ScriptedServing) -> None:
    restarts = serving.engine_metric("tandem_engine_restarts_total")
    with serving.clients() as client:
        whole = client.open(completion(LONG, stream=False), 5)
        client.until(lambda: serving.engine_metric("tandem_num_requests_running") == 5, "rows of the others")
        poison = client.open(completion(2 * POISON_TOKENS, stream=False, seed=POISON_SEED))
        client.until_ended(poison)
        assert (poison[0].status, poison[0].outcome) == (503, "error"), summary(poison)
        client.until_ended(whole)
        assert all(stream.status == 503 for stream in whole), f"each had run in both engines: {summary(whole)}"
        until(serving.ready, "the third engine")
        later = client.open(completion(20), 5)
        client.until_ended(later)
        assert Summary.of(later).done == 5, summary(later)
    assert serving.engine_metric("tandem_engine_restarts_total") - restarts <= 2
    until(serving.rows_and_pages_are_free, "no rows and pages in use")


@pytest.mark.slow
def test_request_that_kills_engines_in_its_first_step_kills_two_at_most(serving: ScriptedServing) -> None:
    until(serving.ready, "the service")
    restarts = serving.engine_metric("tandem_engine_restarts_total")
    with serving.clients() as client:
        poison = client.open(completion(2 * POISON_TOKENS, stream=False, seed=EARLY_POISON_SEED))
        client.until_ended(poison)
        assert (poison[0].status, poison[0].outcome) == (503, "error"), summary(poison)
        until(serving.ready, "the third engine")
        later = client.open(completion(20), 5)
        client.until_ended(later)
        assert Summary.of(later).done == 5, summary(later)
    assert serving.engine_metric("tandem_engine_restarts_total") - restarts <= 2


def test_folder_that_became_unreadable_holds_the_service_until_it_is_mended(
    serving: ScriptedServing, folder: Path
) -> None:
    until(serving.ready, "the service")
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(whole[: len(whole) // 2])
    serving.engine.kill()
    until(lambda: serving.said("config.json cannot be read"), "a line that names the file")
    assert serving.get("/health/live")[0] == 200
    status, body = serving.get("/health/ready")
    assert status == 503 and json.loads(body), "not ready, and says why"
    config.write_text(whole)
    until(serving.ready, "the service with the mended folder")
    assert serving.post("/v1/completions", {"model": "tandem-default", "prompt": "a", "max_tokens": 3})[0] == 200


def test_supervisor_that_was_killed_can_be_started_again_at_once(serving: ScriptedServing) -> None:
    until(serving.ready, "the service")
    assert serving.process is not None
    orphans = [serving.engine, *serving.frontends()]
    serving.process.kill()
    serving.process.wait(GUARD_SECONDS)
    with serving:  # the same command, on the same ports
        assert serving.post("/v1/completions", {"model": "tandem-default", "prompt": "a", "max_tokens": 3})[0] == 200
        until(lambda: not any(is_running(orphan) for orphan in orphans), "the end of the old processes")
