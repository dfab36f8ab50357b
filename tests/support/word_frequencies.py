"""Word frequencies of docstrings and comments, compared with installed packages.

    python -m tests.support.word_frequencies [--top 20] [FOLDER ...]

A diagnostic of private vocabulary: the words that FOLDER (default: the three packages) uses most above or below their
rate in torch.nn, transformers' generation, starlette and httpx. Rates are per 10,000 words with a floor of 0.5; the
deviation is their log ratio weighted by the square root of the larger rate.
"""

import argparse
import ast
import importlib.util
import io
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

OWN = ("protocol", "engine_core", "frontend")
REFERENCE = ("torch.nn", "torch.utils.data", "torch.optim", "transformers.generation", "starlette", "httpx")
FLOOR = 0.5
WORD = re.compile(r"[a-z]{2,}")


def prose(path: Path) -> str:
    """Return the docstrings and comments of a module, without code in backticks."""
    source = path.read_text(errors="replace")
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.append(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append(token.string)
    return re.sub(r"`[^`]*`", " ", "\n".join(texts))


def count(folders: Iterable[Path]) -> Counter[str]:
    """Count the words of all modules below some folders."""
    words: Counter[str] = Counter()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            words.update(WORD.findall(prose(path).lower()))
    return words


def rates(words: Counter[str]) -> dict[str, float]:
    """Return occurrences per 10,000 words."""
    total = sum(words.values())
    return {word: 1e4 * number / total for word, number in words.items()}


def deviations(own: dict[str, float], reference: dict[str, float]) -> list[tuple[float, str]]:
    """Return words by deviation, the largest first; negative ones are used less than in the reference."""
    found = []
    for word in own.keys() | reference.keys():
        ours, theirs = max(FLOOR, own.get(word, 0.0)), max(FLOOR, reference.get(word, 0.0))
        found.append((math.log(ours / theirs) * math.sqrt(max(ours, theirs)), word))
    return sorted(found, key=lambda entry: -abs(entry[0]))


def installed(package: str) -> Path:
    """Return the folder of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(name) for name in OWN], metavar="FOLDER")
    parser.add_argument("--top", type=int, default=20, help="words to print (default 20)")
    arguments = parser.parse_args()
    own = rates(count(arguments.folders))
    reference = rates(count(installed(package) for package in REFERENCE))
    print(f"{'word':<16}{'here':>8}{'there':>8}  per 10,000 words")
    for _, word in deviations(own, reference)[: arguments.top]:
        print(f"{word:<16}{own.get(word, 0.0):>8.1f}{reference.get(word, 0.0):>8.1f}")


if __name__ == "__main__":
    main()
