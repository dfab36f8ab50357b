"""The check of a model's small files, before its weights are downloaded."""

from pathlib import Path

import pytest

from tandem.frontend.config import ChatOptions
from tandem.frontend.supervisor.model import LaunchError
from tandem.frontend.supervisor.preflight import check_before_weights
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.preflight import PreflightReport
from tests.fakes.tokenizer import write_tokenizer

NAME = "org/big"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_engine_is_asked_for_the_folder_with_the_given_settings_and_the_bytes_of_the_weights(folder: Path) -> None:
    asked: list[tuple[EngineOptions, int | None]] = []

    def ask(options: EngineOptions, weight_bytes: int | None) -> PreflightReport:
        asked.append((options, weight_bytes))
        return PreflightReport(shortage="now")  # others use the memory, perhaps not at the start

    check_before_weights(EngineOptions(NAME, max_len=8), None, ask)(folder, 90)
    assert asked == [(EngineOptions(str(folder), max_len=8), 90)]


def test_problems_of_the_engine_are_told_in_its_words(folder: Path) -> None:
    report = PreflightReport(problems=["the architecture A is not supported", "--max-len 9 is too long"])
    with pytest.raises(LaunchError) as refused:
        check_before_weights(EngineOptions(NAME), None, lambda *_: report)(folder, 1)
    *problems, last = str(refused.value).splitlines()
    assert problems == report.problems and NAME in last


def test_engine_that_cannot_be_asked_refuses_too(folder: Path) -> None:
    def ask(*_: object) -> PreflightReport:
        raise ValueError("the engine's libraries cannot be used")

    with pytest.raises(LaunchError, match="the engine's libraries cannot be used"):
        check_before_weights(EngineOptions(NAME), None, ask)(folder, 1)


def test_tokenizer_that_cannot_be_loaded_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LaunchError, match=rf"tokenizer\.json(.|\n)*{NAME}"):
        check_before_weights(EngineOptions(NAME), None, lambda *_: PreflightReport())(folder, 1)


@pytest.mark.parametrize(
    ("file", "text"), [("chat_template.jinja", "{% for %}"), ("tokenizer_config.json", "["), (None, "{{ (")]
)
def test_chat_template_that_cannot_be_loaded_is_refused_where_frontends_start(
    folder: Path, tmp_path: Path, file: str | None, text: str
) -> None:
    given = None if file else tmp_path / "given.jinja"
    (given or folder / str(file)).write_text(text)
    check_before_weights(EngineOptions(NAME), None, lambda *_: PreflightReport())(folder, 1)
    with pytest.raises(LaunchError, match=NAME):
        check_before_weights(EngineOptions(NAME), ChatOptions(template=given), lambda *_: PreflightReport())(folder, 1)


def test_chat_template_of_a_flag_takes_the_place_of_one_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages }}")
    check_before_weights(EngineOptions(NAME), ChatOptions(template=given), lambda *_: PreflightReport())(folder, 1)
