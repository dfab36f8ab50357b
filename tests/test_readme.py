"""What README promises about itself: CI runs its test command, and its map names what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    return re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)


def test_ci_runs_the_test_command_of_the_quick_start() -> None:
    serve, test = commands()
    assert serve.endswith("tandem serve")
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_map_names_what_exists() -> None:
    folder, found = "", 0
    listing = README.split("## The map")[1].split("```")[1]
    for line in listing.splitlines()[1:]:
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if names and not line.startswith(" "):
            folder = names[0]
            assert (ROOT / folder).is_dir(), f"README's map has {folder}"
            continue
        for name in names:
            assert (ROOT / folder / name).exists(), f"README's map has {folder}{name}"
            found += 1
    assert found > 20
