"""Files of API keys with names, rights and limits."""

import os
from collections.abc import Iterable
from pathlib import Path

from tandem.frontend.access.api_key import ApiKey, KeyLimits, Right, digest_of
from tandem.frontend.access.key_file import key_table


def make_key(
    secret: str, name: str = "", rights: Iterable[Right] = (Right.GENERATE,), limits: KeyLimits | None = None
) -> ApiKey:
    """Build a key of this secret; without a name it has that of the secret."""
    return ApiKey(name or secret, digest_of(secret.encode()), frozenset(rights), limits or KeyLimits(max_priority=0))


def write_keys(file: Path, *keys: ApiKey) -> Path:
    """Write the file of these keys in place of the one that was there, as editors do."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(map(key_table, keys)))
    new.chmod(0o600)
    os.replace(new, file)
    return file


def bearer(secret: str) -> dict[str, str]:
    """Return the header of a key."""
    return {"authorization": f"Bearer {secret}"}
