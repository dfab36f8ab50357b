"""API keys: where they come from, and how a request's is compared with them."""

import argparse
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ENVIRONMENT = "TANDEM_API_KEY"
"""Holds keys parted by blanks or commas. Unlike a flag, it does not show in the list of processes."""

_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,512}")


def add_key_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that requests must bring, may be given several times; others see it in the list of processes, so "
        f"rather set {ENVIRONMENT} or give --api-key-file",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with one key a line")


def api_keys(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """All keys given, each once. Raises ValueError for a file that cannot be read and for what can be no key."""
    keys = list(arguments.api_key)
    keys += re.split(r"[\s,]+", environ.get(ENVIRONMENT, "").strip(" ,\t\r\n")) if environ.get(ENVIRONMENT) else []
    if arguments.api_key_file is not None:
        try:
            lines = arguments.api_key_file.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {arguments.api_key_file} cannot be read: {error}") from None
        if not lines:
            raise ValueError(f"--api-key-file {arguments.api_key_file} holds no key")
        keys += lines
    for key in keys:
        if _KEY.fullmatch(key) is None:
            raise ValueError("an API key has 1 to 512 printable ASCII characters, and neither blanks nor commas")
    return tuple(dict.fromkeys(keys))


def key_environment(keys: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which another HTTP process takes these keys, and no others."""
    return {**environ, ENVIRONMENT: ",".join(keys)}


class ApiKeys:
    """Keys to compare with. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def knows(self, key: bytes) -> bool:
        """Takes as long whichever key it is, and whether it is one."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
