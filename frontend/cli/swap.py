"""`tandem swap`: replace the weights of a running server."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tandem.frontend.cli.connection import ServerError, connect
from tandem.frontend.cli.flags import api_key, trust
from tandem.frontend.supervisor.model import is_hub_name


def run_swap(arguments: argparse.Namespace) -> int:
    """Swap the weights, and return the exit code: 0 once they serve (or are staged), 1 if they do not."""
    body: dict[str, Any] = {
        "path": str(Path(arguments.path).absolute()),
        "running": arguments.running,
        "grace": arguments.grace,
        "activate": not arguments.stage_only,
    }
    if arguments.weight_version:
        body["version"] = arguments.weight_version
    try:
        with connect(
            arguments.url, api_key(arguments), arguments.grace + arguments.timeout, trust(arguments)
        ) as server:
            found = server.post("/admin/swap", body)
    except ServerError as error:
        hint = "; give a folder: names on the hub are not taken" if is_hub_name(arguments.path) else ""
        print(f"tandem: {error}{hint}", file=sys.stderr)
        return 1
    if arguments.stage_only:
        print(f"{found.get('path')} is staged")
    else:
        print(f"{found.get('active_path')} serves as version {found.get('weight_version')}")
    return 0
