"""`tandem inspect`: print the scheduler state of a running server as tables."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.flags import api_key, trust

_CLEAR = "\x1b[H\x1b[2J"
_MAX_NAME_CHARS = 40

_SEQUENCES = {
    "state": "STATE", "row": "ROW", "request_id": "REQUEST", "prompt_tokens": "PROMPT", "generated_tokens": "OUTPUT",
    "computed_tokens": "COMPUTED", "cached_tokens": "CACHED", "pages": "PAGES", "shared_pages": "SHARED",
    "priority": "PRIORITY", "preemptions": "PREEMPTED", "age": "AGE", "wait": "WAIT", "session_id": "SESSION",
    "http_request_id": "HTTP REQUEST",
}  # fmt: skip
_DRAFTS = {"drafted_tokens": "DRAFTED", "accepted_tokens": "ACCEPTED"}
"""Further columns of sequences where steps verify drafts."""
_TEXTS = ("state", "session_id", "http_request_id", "adapter")
_SESSIONS = {"session_id": "SESSION", "busy": "BUSY", "pages": "KEPT", "idle": "IDLE"}
_WAITING = ("waiting", "compiling", "following")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the scheduler state, and return the exit code.

    It is printed once, or every `--watch` seconds until an interrupt. The code is 0, or 1 for a server error.
    """
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout, trust(arguments)) as server:
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
    """Fetch and format the scheduler state.

    Raises ServerError if the request fails.
    """
    state = server.get("/admin/scheduler")
    try:
        return render(state)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ServerError(
            "the server's answer is not a scheduler state; use the `tandem` of the server's version"
        ) from None


def _screenful(text: str) -> str:
    """Truncate text to the terminal's size.

    Otherwise the summary could scroll away and long lines could wrap.
    """
    columns, height = shutil.get_terminal_size()
    lines = text.splitlines()
    if len(lines) >= height:
        shown = max(1, height - 2)
        lines = [*lines[:shown], f"and {len(lines) - shown} more lines; run without --watch to see all"]
    return "\n".join([line[:columns] for line in lines])


def render(state: dict[str, Any]) -> str:
    """Format summary, sequences and sessions of a scheduler state.

    state: response to `GET /admin/scheduler`.
    """
    parts = ["\n".join(_summary(state))]
    sequences = [{**one, "wait": one["wait"] if one["state"] in _WAITING else None} for one in state["sequences"]]
    sessions = [{**one, "idle": None if one["busy"] else one["idle"]} for one in state["sessions"]]
    columns = {**_SEQUENCES, **_DRAFTS} if state["speculation"] else _SEQUENCES
    if any(one.get("adapter") for one in sequences):
        columns = {**columns, "adapter": "ADAPTER"}
    tables = ((columns, sequences), (_SESSIONS, sessions))
    parts += [_table(columns, entries) for columns, entries in tables if entries]
    return "\n\n".join(parts)


def _summary(state: dict[str, Any]) -> list[str]:
    queue, rows, pages, cache = (state[name] for name in ("queue", "rows", "pages", "prefix_cache"))
    rate = "none yet" if cache["hit_rate"] is None else f"{cache['hit_rate']:.1%}"
    unlisted = f", {queue['unlisted']} of them not listed" if queue["unlisted"] else ""
    waiting = f"{queue['waiting']} waiting{unlisted}, the oldest for {queue['oldest_wait']:.1f} s"
    settling = f" ({pages['settling']} of them until a step in flight ends)" if pages["settling"] else ""
    # Pages that are only cached count neither as used nor as free.
    unused = max(0, pages["total"] - pages["used"] - pages["free"])
    busy = sum([session["busy"] for session in state["sessions"]])
    lines = {
        "policy": state["policy"],
        **({"pause": _pause(state["pause"])} if state["pause"]["mode"] else {}),
        **({"sleep": "memory of the weights or KV is released; POST /wake_up ends it"} if state["is_sleeping"] else {}),
        "queue": waiting if queue["waiting"] else "empty",
        "rows": f"{rows['running']} of {rows['total']} in use",
        "pages": f"{pages['used']} of {pages['total']} in use{settling}, {unused} cached and unused, {pages['free']} "
        f"free, {pages['page_size']} tokens each",
        "prefix cache": f"{cache['pages']} pages, hit rate {rate} ({cache['hit_tokens']} of {cache['queried_tokens']} "
        f"prompt tokens), {cache['evicted_pages']} evicted",
        **({"speculation": _speculation(state["speculation"])} if state["speculation"] else {}),
        **({"checkpoints": _checkpoints(cache)} if cache["max_checkpoints"] else {}),
        "preemptions": str(state["preemptions"]),
        "sessions": f"{len(state['sessions'])}, {busy} of them busy, {state['evicted_sessions']} evicted",
    }
    return [f"{name:<13} {text}" for name, text in lines.items()]


def _checkpoints(cache: dict[str, Any]) -> str:
    """Describe the checkpoints of recurrent layers."""
    held, most, evicted = (cache[name] for name in ("checkpoints", "max_checkpoints", "evicted_checkpoints"))
    return f"{held} of {most} in use, {evicted} evicted"


def _pause(pause: dict[str, Any]) -> str:
    """Describe the current pause."""
    arrivals = "wait" if pause["new_requests"] == "hold" else "are refused"
    return f"{pause['status']}, mode {pause['mode']}; requests that arrive {arrivals}; POST /admin/resume ends it"


def _speculation(found: dict[str, Any]) -> str:
    """Describe how tokens are drafted, and how many drafts were accepted."""
    rate = "none yet" if found["acceptance_rate"] is None else f"{found['acceptance_rate']:.1%}"
    most = f"{'up to ' if found['adaptive'] else ''}{found['max_drafts']} drafts a step"
    positions = ", ".join(map(str, found["accepted_tokens_per_position"]))
    return (
        f"{found['method']}, {most}; acceptance rate {rate} ({found['accepted_tokens']} of {found['drafted_tokens']} "
        f"drafts; by position {positions})"
    )


def _table(columns: dict[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """Format a table, text columns left-aligned and the others right-aligned."""
    lines = [list(columns.values()), *([_cell(entry[name]) for name in columns] for entry in entries)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    texts = [name in _TEXTS for name in columns]
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
            # Names come from clients, so control characters in them must not reach the terminal.
            name = "".join([character if character.isprintable() else "\ufffd" for character in value])
            return name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 3] + "..."
        case _:
            return str(value)
