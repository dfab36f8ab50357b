"""Write the tables of flags in the documents from the parser itself: `python -m tests.support.flag_tables`."""

import argparse
import re
from pathlib import Path

from tandem.frontend.cli.bench.flags import BENCH_ALIASES, FOREIGN_BENCH_FLAGS
from tandem.frontend.cli.main import build_parser
from tandem.frontend.cli.parsing.foreign_flags import ALIASES, FOREIGN_FLAGS, Alias, ForeignFlag

ROOT = Path(__file__).parents[2]
PAGES = ("engine_core/FLAGS.md", "frontend/FLAGS.md", "deploy/FLAGS.md", "deploy/OPERATIONS.md")
MIGRATION = ROOT / "docs" / "migration.md"
ALIAS_TABLE = re.compile(r"<!-- aliases: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
FOREIGN_TABLE = re.compile(r"<!-- foreign flags: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLE = re.compile(r"<!-- flags: ([^>]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name."""
    (choices,) = (
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices)


def groups() -> dict[str, list[argparse.Action]]:
    """Return the flags of `tandem serve` by the title of their group, which holds all flags of servers."""
    found = {}
    for group in commands()["serve"]._action_groups:
        flags = [
            action
            for action in group._group_actions
            if action.option_strings
            and action.dest not in ("help", "help_all")
            and action.help is not argparse.SUPPRESS
        ]
        if flags:
            found[group.title or ""] = flags
    return found


def render(title: str) -> str:
    """Render one group as a Markdown table, a row a flag."""
    rows = ["| flag | meaning |", "| --- | --- |"]
    for action in groups()[title]:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        if action.choices:
            value = " " + "\\|".join(map(str, action.choices))
        meaning = str(action.help).replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}{value}` | {meaning} |")
    return "\n".join(rows) + "\n"


def render_foreign(command: str) -> str:
    """Render the answers of a command to flags of other programs, those with the same answer in one row."""
    answers: dict[ForeignFlag, list[str]] = {}
    for name, answer in {"serve": FOREIGN_FLAGS, "bench": FOREIGN_BENCH_FLAGS}[command].items():
        answers.setdefault(answer, []).append(f"`{name}`")
    rows = ["| there | here | what is different |", "| --- | --- | --- |"]
    for answer, names in answers.items():
        rows.append(f"| {', '.join(names)} | {f'`{answer.ours}`' if answer.ours else 'none'} | {answer.reason} |")
    return "\n".join(rows) + "\n"


def render_aliases(command: str) -> str:
    """Render the flags of other programs that a command takes like its own."""
    aliases: dict[Alias, list[str]] = {}
    for name, alias in {"serve": ALIASES, "bench": BENCH_ALIASES}[command].items():
        aliases.setdefault(alias, []).append(f"`{name}`")
    rows = ["| there | here |", "| --- | --- |"]
    rows += [f"| {', '.join(names)} | `{alias.meaning}` |" for alias, names in aliases.items()]
    return "\n".join(rows) + "\n"


def written(page: str) -> list[tuple[str, str]]:
    """Return the titles and texts of the tables that a page holds."""
    return TABLE.findall((ROOT / page).read_text())


def main() -> None:
    """Replace every table by what the parser says."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(TABLE.sub(lambda m: f"<!-- flags: {m[1]} -->\n{render(m[1])}<!-- end -->", path.read_text()))
    tables = FOREIGN_TABLE.sub(
        lambda m: f"<!-- foreign flags: {m[1]} -->\n{render_foreign(m[1])}<!-- end -->", MIGRATION.read_text()
    )
    tables = ALIAS_TABLE.sub(lambda m: f"<!-- aliases: {m[1]} -->\n{render_aliases(m[1])}<!-- end -->", tables)
    MIGRATION.write_text(tables)


if __name__ == "__main__":
    main()
