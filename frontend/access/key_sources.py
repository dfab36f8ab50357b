"""Sources of API keys without names.

They are flags, a file with one key per line, and the environment.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tandem.protocol.text_files import decode_text

ENVIRONMENT = "TANDEM_API_KEY"
"""Environment variable with keys, separated by whitespace or commas. Unlike a flag it is not visible in the process
list."""

_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,512}")


def add_key_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"API key that requests must send; may be repeated. Other users can see it in the process list, so prefer "
        f"{ENVIRONMENT} or --api-key-file",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with one API key per line")


def api_keys(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Collect the keys from flags, environment and file without duplicates.

    Raises ValueError for a file that cannot be read or is empty, and for a malformed key.

    """
    keys = list(arguments.api_key)
    keys += re.split(r"[\s,]+", environ.get(ENVIRONMENT, "").strip(" ,\t\r\n")) if environ.get(ENVIRONMENT) else []
    if arguments.api_key_file is not None:
        try:
            lines = decode_text(arguments.api_key_file.read_bytes()).split()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"--api-key-file {arguments.api_key_file} cannot be read: {reason}") from None
        if not lines:
            raise ValueError(f"--api-key-file {arguments.api_key_file} contains no key; write one per line")
        keys += lines
    for key in keys:
        if _KEY.fullmatch(key) is None:
            raise ValueError("an API key must have 1 to 512 printable ASCII characters without blanks and commas")
    return tuple(dict.fromkeys(keys))


def key_environment(keys: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment that passes these API keys to another HTTP process.

    That process accepts no other keys.
    """
    return {**environ, ENVIRONMENT: ",".join(keys)}
