"""The language of the code: how docstrings open, and words that a native reader stumbles over."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import MODULES, ROOT, statements, tree_of

BENCHMARKS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "benchmarks").rglob("*.py")
}
CHECKED = MODULES | BENCHMARKS
MAX_OPENING = 80
"""Characters of a docstring's first line."""
RIDDLES = re.compile(r"(What|How|Whether|Who|Whoever|Whose|Where|Why|Of|As|That|Those|So many|The same)\b")
"""Openings that leave the reader to guess the subject."""
CALQUES = re.compile(
    r"\b(is|are) no (?!longer|more|different|other|smaller|larger|less)[a-z]+|\bfor ever\b|\bso many\b|\bnobody\b"
    r"|\bnot to be had\b|\bhis own\b|\bnone is\b|\ball is well\b",
    re.IGNORECASE,
)
"""Turns of phrase that are another language's, word for word."""

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def openings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield the first line of every docstring of a file, with what it documents."""
    tree = tree_of(path)
    for node in (tree, *statements(tree)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text.splitlines()[0]


def third_person(line: str) -> bool:
    """Return True for "Returns ..." and the like, where an imperative belongs."""
    first = line.split(" ")[0]
    return bool(re.fullmatch(r"[A-Z][a-z]+s", first)) and not first.endswith("ss")


def test_docstrings_open_with_a_short_line_that_names_its_subject() -> None:
    wrong = []
    for module, path in CHECKED.items():
        for node, line in openings(path):
            place = f"{module}:{getattr(node, 'lineno', 1)}: {line}"
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            prop = function and any("property" in ast.unparse(mark) for mark in node.decorator_list)
            if len(line) >= MAX_OPENING or RIDDLES.match(line) or (function and not prop and third_person(line)):
                wrong.append(place)
            elif line[-1] not in ".:`)" and path.name != "die_with_parent.py":
                wrong.append(f"{place} (no full stop)")
    assert wrong == []


def test_sentences_are_plain_english() -> None:
    wrong = []
    for module, path in CHECKED.items():
        lines = enumerate(path.read_text().splitlines(), 1)
        wrong += [f"{module}:{number}: {line.strip()}" for number, line in lines if CALQUES.search(line)]
    assert wrong == []
