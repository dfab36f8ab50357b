"""`tandem inspect`: what the scheduler of a running server holds, as tables."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.flags import api_key

_CLEAR = "\x1b[H\x1b[2J"
_LONGEST_NAME = 40

_SEQUENCES = {
    "state": "STATE", "row": "ROW", "request_id": "REQUEST", "prompt_tokens": "PROMPT", "generated_tokens": "OUTPUT",
    "computed_tokens": "COMPUTED", "cached_tokens": "CACHED", "pages": "PAGES", "shared_pages": "SHARED",
    "priority": "PRIORITY", "preemptions": "PREEMPTED", "age": "AGE", "wait": "WAIT", "session_id": "SESSION",
}  # fmt: skip
_SESSIONS = {"session_id": "SESSION", "busy": "BUSY", "pages": "KEPT", "idle": "IDLE"}
_WAITING = ("waiting", "compiling", "following")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints it once, or every `--watch` seconds until an interrupt. Returns the exit code: 0, 1 for no answer."""
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout) as server:
            if arguments.watch is None:
                print(report(server))
                return 0
            while True:
                text = report(server)
                print(_CLEAR + _screenful(text) if sys.stdout.isatty() else text + "\n", flush=True)
                time.sleep(arguments.watch)
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1


def report(server: Connection) -> str:
    """Raises ServerError."""
    found = server.get("/admin/scheduler")
    try:
        return render(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ServerError("the server's answer is no scheduler's state; it may be of another version") from None


def _screenful(text: str) -> str:
    """As much as the terminal shows at a time: the summary is not to scroll away, and long lines are not to break."""
    columns, height = shutil.get_terminal_size()
    lines = text.splitlines()
    if len(lines) >= height:
        shown = max(1, height - 2)
        lines = [*lines[:shown], f"and {len(lines) - shown} lines more; without --watch all are shown"]
    return "\n".join([line[:columns] for line in lines])


def render(found: dict[str, Any]) -> str:
    """A summary, the sequences and the sessions. `found` is what `GET /admin/scheduler` answers."""
    parts = ["\n".join(_summary(found))]
    sequences = [{**one, "wait": one["wait"] if one["state"] in _WAITING else None} for one in found["sequences"]]
    sessions = [{**one, "idle": None if one["busy"] else one["idle"]} for one in found["sessions"]]
    tables = ((_SEQUENCES, sequences), (_SESSIONS, sessions))
    parts += [_table(columns, entries) for columns, entries in tables if entries]
    return "\n\n".join(parts)


def _summary(found: dict[str, Any]) -> list[str]:
    queue, rows, pages, cache = (found[name] for name in ("queue", "rows", "pages", "prefix_cache"))
    rate = "none yet" if cache["hit_rate"] is None else f"{cache['hit_rate']:.1%}"
    unlisted = f", {queue['unlisted']} of them not listed" if queue["unlisted"] else ""
    waiting = f"{queue['waiting']} waiting{unlisted}, the oldest for {queue['oldest_wait']:.1f} s"
    settling = f" ({pages['settling']} of them until a step in flight ends)" if pages["settling"] else ""
    # Cached ones that nobody uses are neither in use nor free.
    unused = max(0, pages["total"] - pages["used"] - pages["free"])
    busy = sum([session["busy"] for session in found["sessions"]])
    lines = {
        "policy": found["policy"],
        "queue": waiting if queue["waiting"] else "nobody waits",
        "rows": f"{rows['running']} of {rows['total']} in use",
        "pages": f"{pages['used']} of {pages['total']} in use{settling}, {unused} cached and unused, {pages['free']} "
        f"free, {pages['page_size']} tokens each",
        "prefix cache": f"{cache['pages']} pages, hit rate {rate} ({cache['hit_tokens']} of {cache['queried_tokens']} "
        f"prompt tokens), {cache['evicted_pages']} evicted",
        "preemptions": str(found["preemptions"]),
        "sessions": f"{len(found['sessions'])}, {busy} of them busy, {found['evicted_sessions']} evicted",
    }
    return [f"{name:<13} {text}" for name, text in lines.items()]


def _table(columns: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """Right-aligned columns, but for those of text."""
    lines = [list(columns.values()), *([_cell(entry[name]) for name in columns] for entry in entries)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    texts = [name in ("state", "session_id") for name in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f} s"
        case str():
            # A name is a client's text: nothing in it may reach the terminal as a control sequence.
            name = "".join([character if character.isprintable() else "\ufffd" for character in value])
            return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
        case _:
            return str(value)
