"""The READMEs are true: their commands run in CI, their maps name what exists, their flags are the parser's."""

import re
from pathlib import Path

import pytest

from tests.support.flag_tables import (
    ALIAS_TABLE,
    FOREIGN_TABLE,
    MIGRATION,
    PAGES,
    commands,
    groups,
    render,
    render_aliases,
    render_foreign,
    written,
)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "*/*.md", "deploy/*/*.md")
    for path in ROOT.glob(pattern)
    if not path.parent.name.startswith(".") and path.name != "CHANGELOG.md"
)


def names(documents: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in documents]


def test_ci_runs_the_test_commands_of_the_quick_start() -> None:
    serve, test = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)
    assert serve.endswith("tandem serve")
    commands = test.split(" && ")
    lines = [line.removesuffix(" || status=$?") for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert [line for line in lines if line in commands] == commands


@pytest.mark.parametrize("page", names(DOCUMENTS))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", names(DOCUMENTS))
def test_links_to_a_heading_find_it(page: str) -> None:
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]*)\)", path.read_text()):
        assert anchor in anchors(path.parent / target if target else path), f"{page} links to {target}#{anchor}"


@pytest.mark.parametrize("package", ["engine_core", "frontend", "protocol"])
def test_maps_name_every_child_of_a_package_and_nothing_else(package: str) -> None:
    listing = next(
        block for block in re.findall(r"```text\n(.*?)```", (ROOT / package / "README.md").read_text(), re.DOTALL)
        if block.startswith(f"{package}/\n")
    )  # fmt: skip
    named = {
        name.rstrip("/")
        for line in listing.splitlines()[1:]
        for name in re.split(r"\s{2,}", line.strip())[0].split()
    }  # fmt: skip
    there = {
        path.name for path in (ROOT / package).iterdir()
        if path.name not in ("README.md", "__init__.py", "__main__.py", "__pycache__")
    }  # fmt: skip
    assert named == there


@pytest.mark.parametrize("page", names(DOCUMENTS))
def test_paths_in_code_spans_exist(page: str) -> None:
    """A span such as `engine_core/control.py` is a path from the root or from the page's folder."""
    path = ROOT / page
    for span in re.findall(r"`([\w./-]+\.(?:py|sh|json|yml|md))`", path.read_text()):
        places = [ROOT / span, path.parent / span, ROOT / "benchmarks" / "results" / span]
        assert span in MODEL_FILES or any(place.exists() for place in places), f"{page} names {span}"


MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "vocab.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)
"""Files of a user's model folder."""


@pytest.mark.parametrize("page", names(DOCUMENTS))
def test_commands_and_flags_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    parsers = commands()
    known = {flag for parser in parsers.values() for action in parser._actions for flag in action.option_strings}
    for command in re.findall(r"`tandem (?!is ready)([a-z-]+)", text):
        assert command in parsers, f"{page} names `tandem {command}`"
    for line in re.findall(r"^(?:\.venv/bin/)?tandem .*$", text, re.MULTILINE):
        for flag in re.findall(r"(?<!\S)--[a-z-]+", line):
            assert flag in known, f"{page} uses {flag}"
    for module in re.findall(r"python3? -m (benchmarks[\w.]*)", text):
        found = ROOT.joinpath(*module.split("."))
        assert found.with_suffix(".py").exists() or (found / "__main__.py").exists(), f"{page} runs {module}"


def test_tables_of_flags_are_the_parsers() -> None:
    """`python -m tests.support.flag_tables` writes them."""
    tables = [table for page in PAGES for table in written(page)]
    assert sorted(title for title, _ in tables) == sorted(groups())
    for title, text in tables:
        assert text == render(title), title


def test_tables_of_foreign_flags_are_what_the_commands_answer() -> None:
    text = MIGRATION.read_text()
    for pattern, rendered in ((FOREIGN_TABLE, render_foreign), (ALIAS_TABLE, render_aliases)):
        tables = pattern.findall(text)
        assert [command for command, _ in tables] == ["serve", "bench"]
        for command, table in tables:
            assert table == rendered(command)
    same = set(re.findall(r"`(--[a-z-]+)`", FOREIGN_TABLE.sub("", text)))
    known = {flag for name in ("serve", "bench") for flag in commands()[name]._option_string_actions}
    assert same <= known
