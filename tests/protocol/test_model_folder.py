"""The chat templates of a model's folder, wherever it keeps them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.model_folder import (
    TemplateFileError,
    TemplateSource,
    find_templates,
    max_positions,
    read_settings,
    read_template,
    template_fingerprint,
)

TEXT = "{{ messages }}"
ONE = TemplateSource({"default": TEXT}, "").fingerprint


def jinja(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEXT)


def configured(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEXT, "bos_token": "<s>"}))


def listed(folder: Path) -> None:
    entry = {"name": "default", "template": TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [entry]}))


def apart(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEXT}))


@pytest.mark.parametrize("write", [jinja, configured, listed, apart])
def test_one_template_has_one_fingerprint_wherever_it_is_kept(tmp_path: Path, write: Callable[[Path], None]) -> None:
    assert (find_templates(tmp_path), template_fingerprint(tmp_path)) == (None, "")
    write(tmp_path)
    assert template_fingerprint(tmp_path) == ONE


def test_another_text_and_a_further_template_change_the_fingerprint(tmp_path: Path) -> None:
    jinja(tmp_path)
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text(TEXT)
    both = template_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEXT + " ")
    assert len({ONE, both, template_fingerprint(tmp_path)}) == 3


def test_a_template_that_cannot_be_read_is_named_and_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateFileError, match=r"chat_template\.jinja\b.*\butf-8\b"):
        find_templates(tmp_path)
    assert template_fingerprint(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a":', r".*\(Expecting value.*\)"),
        ("\xff", ".*utf-8"),
        ("[]", ".*JSON object"),
        ('{"chat_template": "a\\ud800b"}', ".*surrogates"),
        ("[" * 100_000, ".*recursion"),
    ],
)
def test_damaged_settings_are_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TemplateFileError, match=rf"tokenizer_config\.json {problem}"):
        read_settings(path)
    assert template_fingerprint(tmp_path) == ""


def test_settings_of_a_missing_file_are_empty_and_numbers_may_be_infinite(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    assert read_settings(path) == {}
    path.write_text('{"model_max_length": Infinity}')
    assert read_settings(path) == {"model_max_length": float("inf")}
    path.unlink()
    path.mkdir()
    with pytest.raises(TemplateFileError, match=r"tokenizer_config\.json\b.*\bdirectory"):
        read_settings(path)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, None),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 9}, 64),
        ({"max_position_embeddings": "many"}, None),
        ({"rope_scaling": "yarn", "max_position_embeddings": 2048}, None),
        ({}, None),
    ],
)
def test_positions_are_those_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(tmp_path) == positions


def test_a_folder_without_a_configuration_states_no_positions(tmp_path: Path) -> None:
    assert max_positions(tmp_path) is None


def test_files_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32}', encoding="utf-8-sig")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8-sig")
    (tmp_path / "template.jinja").write_text("{{ 1 }}", encoding="utf-8-sig")
    assert max_positions(tmp_path) == 32
    assert read_settings(tmp_path / "tokenizer_config.json") == {"bos_token": "<s>"}
    assert read_template(tmp_path / "template.jinja") == "{{ 1 }}"
    (tmp_path / "template.jinja").write_text("{{ 1 }}", encoding="utf-16")
    with pytest.raises(TemplateFileError, match="UTF-16"):
        read_template(tmp_path / "template.jinja")
