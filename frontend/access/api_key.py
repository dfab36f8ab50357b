"""API keys with their rights and limits, and the key of a request."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from tandem.protocol.commands import MAX_PRIORITY

API_KEY = "tandem.api_key"
"""Key of the ASGI scope under which the API key of a request is kept."""
NO_KEY = hashlib.sha256(b"").digest()
"""Digest of the key of a request that has none."""
_NAME_DIGITS = 8
"""Hex digits of a digest in the name of a key that was given without one."""


class Right(StrEnum):
    """Right that a key may have."""

    GENERATE = "generate"
    """Generate, tokenize, and use one's own sessions and stored responses."""
    METRICS = "metrics"
    """Read the metrics."""
    ADMIN = "admin"
    """See what the scheduler holds, change its policy, pause and resume the engine."""


ALL_RIGHTS = frozenset(Right)


class KeyLimits(Struct, frozen=True):
    """Limits of all keys of one name together.

    They hold over all frontends of an engine; None stands for no limit.
    """

    max_concurrent: int | None = None
    """Most sequences in progress; each choice of a request is one."""
    tokens_per_minute: int | None = None
    """Most tokens, of prompts and of outputs, in a minute."""
    max_priority: int = MAX_PRIORITY
    """Greatest priority of a request."""


NO_LIMITS = KeyLimits()


class ApiKey(Struct, frozen=True):
    """One API key, of which only the digest is kept."""

    name: str
    """Name in metrics and logs, and of the limits, sessions and cached prefixes; keys may share one while rotating."""
    digest: bytes
    """SHA-256 of the key."""
    rights: frozenset[Right] = frozenset((Right.GENERATE,))
    limits: KeyLimits = NO_LIMITS
    owner: str = ""
    """Name under which its stored responses are kept."""


class KeyRing:
    """The API keys in force. It never changes; a reload makes another one."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Mapping[bytes, ApiKey]:
        """The keys by their digests."""
        return self._keys

    @property
    def names(self) -> frozenset[str]:
        """The names of all keys."""
        return frozenset(key.name for key in self._keys.values())

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key that a request gave, or None if it is not one of these.

        What is looked up is a digest: how long that takes tells nothing of the keys.
        """
        digest = digest_of(secret)
        if digest == NO_KEY:
            return None
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(secret).digest()


def unnamed_key(secret: str) -> ApiKey:
    """Return a key that a flag or the environment gave.

    It has the right to generate. Its name is made of its digest; its stored responses are kept under the whole digest.
    """
    digest = digest_of(secret.encode())
    return ApiKey(f"key-{digest.hex()[:_NAME_DIGITS]}", digest, owner=digest.hex())


def api_key(scope: Mapping[str, Any]) -> ApiKey | None:
    """Return the key of a request from its ASGI scope; None on a server without keys."""
    key: ApiKey | None = scope.get(API_KEY)
    return key


def key_name(scope: Mapping[str, Any]) -> str:
    """Return the name of the key of a request; "" on a server without keys."""
    key = api_key(scope)
    return "" if key is None else key.name
