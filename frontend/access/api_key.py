"""API keys with rights and limits, and lookup of a request's key."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from tandem.protocol.commands import MAX_PRIORITY

API_KEY = "tandem.api_key"
"""Key of the ASGI scope that holds the API key of a request."""
NO_KEY = hashlib.sha256(b"").digest()
"""Digest used for requests without a key."""
_NAME_DIGITS = 8
"""Hex digits of the digest in the name of a key that was given without one."""


class Right(StrEnum):
    """Right that a key may have."""

    GENERATE = "generate"
    """Generate, tokenize, and use sessions and stored responses of this key."""
    METRICS = "metrics"
    """Read the metrics."""
    ADMIN = "admin"
    """Inspect the scheduler, change its policy, pause and resume the engine."""


ALL_RIGHTS = frozenset(Right)


class KeyLimits(Struct, frozen=True):
    """Limits shared by all keys of one name.

    They apply across all frontends of an engine; None means unlimited.
    """

    max_concurrent: int | None = None
    """Maximum number of sequences in progress; each choice of a request counts."""
    tokens_per_minute: int | None = None
    """Maximum number of prompt and output tokens per minute."""
    max_priority: int = MAX_PRIORITY
    """Maximum priority of a request."""


NO_LIMITS = KeyLimits()


class ApiKey(Struct, frozen=True):
    """API key. Only its digest is stored."""

    name: str
    """Name in metrics and logs, which limits, sessions and cached prefixes belong to; keys may share one during
    rotation."""
    digest: bytes
    """SHA-256 of the key."""
    rights: frozenset[Right] = frozenset((Right.GENERATE,))
    limits: KeyLimits = NO_LIMITS
    owner: str = ""
    """Owner of its stored responses."""


class KeyRing:
    """Immutable set of the valid API keys; a reload creates a new one."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Mapping[bytes, ApiKey]:
        """Keys by digest."""
        return self._keys

    @property
    def names(self) -> frozenset[str]:
        """Names of all keys."""
        return frozenset(key.name for key in self._keys.values())

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key with this secret, or None if there is none.

        The lookup uses the digest, so its timing reveals nothing about the keys.
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
    """Return a key given by a flag or the environment.

    It has the right to generate. Its name is derived from its digest, and the owner of its stored responses is the full
    digest.
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
