"""Flags of the commands that talk to a server, and the fields they fill.

The fields are those of requests to the running server.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tandem.frontend.config import MAX_SECONDS, Flag
from tandem.frontend.request.options import FLAG_FIELDS
from tandem.protocol.engine_options import flag_name

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TANDEM_API_KEY"
INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

# fmt: off
CLIENT_FLAGS = (
    Flag("timeout", "server", "seconds without a byte after which the command gives up on an answer", float,
         (0.001, MAX_SECONDS), default=600.0),
)
BATCH_FLAGS = (
    Flag("concurrency", "", "number of requests in flight at a time", int, (1, 4096), default=32),
    Flag("retries", "", "number of retries of a request while the server is busy or unreachable", int, (0, 1000),
         default=8),
)
INSPECT_FLAGS = (
    Flag("watch", "", "refresh the output every SECONDS until Ctrl-C", float, (0.1, MAX_SECONDS), metavar="SECONDS"),
)
# fmt: on


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a server."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", default=DEFAULT_URL, type=server_url, metavar="URL", help=f"address (default: {DEFAULT_URL})"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key to send, visible in the process list (default: the first key in ${KEY_VARIABLE}, which is not)",
    )
    for flag in CLIENT_FLAGS:
        flag.add_to(group)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of generation.

    Fields without a given flag are left to the server.
    """
    group = parser.add_argument_group("answer")
    group.add_argument("--model", metavar="NAME", help="name of the model (default: the first one of the server)")
    for field in FLAG_FIELDS:
        group.add_argument(flag_name(field.name), type=field.kind.flag_type, metavar="N", help=field.help)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends the answer; may be given several times"
    )
    group.add_argument("--json-schema", type=_schema, metavar="FILE", help="file with the JSON schema of the answer")
    group.add_argument("--usage", action="store_true", help="print token counts and speeds on stderr")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the request fields that were given as flags."""
    names = (*(field.name for field in FLAG_FIELDS), "stop")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.json_schema is not None:
        form = {"name": "answer", "strict": True, "schema": arguments.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


def api_key(arguments: argparse.Namespace) -> str | None:
    """Return the API key to send, or None.

    The key is the flag's, or else the first one in the environment variable.
    """
    keys = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    return arguments.api_key or (keys[0] if keys else None)


def server_url(text: str) -> str:
    """Parse the address of a server, and remove OpenAI's `/v1` from its end.

    Raises ArgumentTypeError for an address that is not valid.
    """
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} must start with http:// or https://")
    return text.rstrip("/").removesuffix("/v1")


def _schema(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from None
