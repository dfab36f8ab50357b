"""Turns of phrase that code and documents avoid."""

import re

from tests.test_architecture import MODULES, ROOT

BENCHMARKS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "benchmarks").rglob("*.py")
}
CHECKED = MODULES | BENCHMARKS
CALQUES = re.compile(
    r"\b(is|are) no (?!longer|more|different|other|smaller|larger|less)[a-z]+|\bfor ever\b|\bso many\b|\bnobody\b"
    r"|\bnot to be had\b|\bhis own\b|\bnone is\b|\ball is well\b",
    re.IGNORECASE,
)
"""Turns of phrase that are another language's, word for word."""


def test_sentences_are_plain_english() -> None:
    wrong = []
    for module, path in CHECKED.items():
        lines = enumerate(path.read_text().splitlines(), 1)
        wrong += [f"{module}:{number}: {line.strip()}" for number, line in lines if CALQUES.search(line)]
    assert wrong == []
