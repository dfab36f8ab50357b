"""The chat templates of a model's folder, wherever it keeps them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.protocol.model_folder import TemplateFileError, TemplateSource, find_templates, template_fingerprint

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
    with pytest.raises(TemplateFileError, match=r"chat_template\.jinja cannot be read: 'utf-8' codec"):
        find_templates(tmp_path)
    assert template_fingerprint(tmp_path) == ""
