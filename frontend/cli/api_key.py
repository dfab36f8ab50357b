"""The command `tandem api-key`.

It creates a new key, and its table for the key file of a server.
"""

import argparse
import secrets
import sys

from tandem.frontend.access.api_key import ApiKey, KeyLimits, Right, digest_of
from tandem.frontend.access.key_file import check_name, key_table
from tandem.protocol.errors import ExitCode

_SECRET_BYTES = 32


def run_api_key(arguments: argparse.Namespace) -> int:
    """Print a new key on stderr and its table on stdout.

    Raises ValueError for an invalid name.
    """
    name = check_name(arguments.name)
    secret = f"sk-{secrets.token_urlsafe(_SECRET_BYTES)}"
    limits = KeyLimits(arguments.max_concurrent, arguments.tokens_per_minute, arguments.max_priority)
    key = ApiKey(name, digest_of(secret.encode()), frozenset(map(Right, arguments.rights or [Right.GENERATE])), limits)
    print(key_table(key), flush=True)
    print(f"key of {name}, shown only now: {secret}", file=sys.stderr)
    return ExitCode.OK
