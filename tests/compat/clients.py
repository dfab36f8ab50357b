"""Check real clients, at pinned versions, against real servers, and print a table of what they can do.

    python -m tests.compat.clients --environments /tmp/clients [--only NAME ...]

Each client is installed into a directory of its own under `--environments` (from PyPI or npm, which has to be there)
and runs without accounts, telemetry and updates. The agents get a frontend whose scripted engine calls a tool and then
answers, in a context of 131,072 tokens; the libraries get `tandem serve` with the default model. A cell is "ok", the
message with which the client was refused, or "not offered". `benchmarks/results/clients.json` keeps the results; a run
with `--only` replaces those of its clients. Exits with 1 if one was refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.results import RESULTS, save
from tests.compat.agent_server import AgentServer
from tests.compat.installed import Installed, install
from tests.compat.pins import CLIENTS, Client
from tests.support.serving import Serving

COLUMNS = ("first turn", "second turn", "tool", "streaming", "structured", "more")
MOST_SECONDS = 900


@dataclass(frozen=True)
class Row:
    """What the checks of one client found."""

    client: Client
    checks: list[dict[str, Any]]

    def cell(self, column: str) -> str:
        found = [check for check in self.checks if check["column"] in (column, "the script")]
        refused = [f"{check['check']}: {check['detail']}" for check in found if not check["ok"]]
        if refused:
            return "refused: " + "; ".join(refused).replace("\n", " ").replace("|", "/")[:300]
        return ("ok" if column != "more" else f"{len(found)} ok") if found else "not offered"

    def line(self) -> str:
        cells = (self.client.name, self.client.version, *(self.cell(column) for column in COLUMNS))
        return f"| {' | '.join(cells)} |"

    def figures(self) -> dict[str, Any]:
        cells = {column: self.cell(column) for column in COLUMNS}
        return {"client": self.client.name, "packages": [*self.client.packages], **cells, "checks": self.checks}


def checked(installed: Installed, url: str) -> list[dict[str, Any]]:
    """Return the result of each check; tracebacks are logged."""
    log = installed.folder / "log.txt"
    with log.open("w") as errors:
        done = subprocess.run(
            installed.command(url), cwd=installed.folder, env=installed.environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=MOST_SECONDS,
            check=False,
        )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"column":')]
    if done.returncode != 0 or not results:
        detail = f"exit {done.returncode}, see {log}"
        results.append({"column": "the script", "check": "exit", "ok": False, "detail": detail, "seconds": 0.0})
    return results


def merged(fresh: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of all clients: fresh ones, and those of earlier runs for the same pins."""
    path = RESULTS / "clients.json"
    kept = json.loads(path.read_text())["figures"] if path.exists() else []
    found = {row["client"]: row for row in [*kept, *fresh]}
    pinned = [found.get(client.name) for client in CLIENTS]
    return [row for row, client in zip(pinned, CLIENTS, strict=True) if row and row["packages"] == [*client.packages]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, required=True, help="directory for the clients")
    parser.add_argument("--only", nargs="*", choices=[client.name for client in CLIENTS], metavar="NAME")
    arguments = parser.parse_args()
    environments = arguments.environments.resolve()
    environments.mkdir(parents=True, exist_ok=True)
    wanted = [client for client in CLIENTS if not arguments.only or client.name in arguments.only]
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tdm-")))
        urls = {}
        if any(client.server == "agent" for client in wanted):
            urls["agent"] = stack.enter_context(AgentServer(folder)).url
        if any(client.server == "model" for client in wanted):
            urls["model"] = stack.enter_context(Serving(folder / "serve.log")).url
        print(f"| client | version | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}")
        for client in wanted:
            rows.append(Row(client, checked(install(client, environments), urls[client.server])))
            print(rows[-1].line(), flush=True)
    save("clients", {"columns": COLUMNS}, merged([row.figures() for row in rows]))
    return 0 if all(check["ok"] for row in rows for check in row.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
