"""Server addresses: URLs of HTTP or of a Unix socket."""

import re
from urllib.parse import quote, unquote, urlsplit

from tandem.frontend.listening import UNIX_SCHEME

_SCHEMES = ("http://", "https://", UNIX_SCHEME)
_NO_SCHEME = re.compile(r"(?!\d+$)([\w.-]+|\[[\da-fA-F:.]+\])(:[^/@]*)?(/[^@]*)?")
"""Matches HOST:PORT or a host alone, for http. A password, a port alone or a mistyped scheme do not match."""
_PASSWORD = re.compile(r"^((?:[^/?#:@]*:)?/+)?([^/?#:@]*):[^/?#]*(?=@)")


def server_url(text: str) -> str:
    """Normalize the address of a server, without OpenAI's `/v1` at its end.

    HOST:PORT means `http://HOST:PORT`. The path of a Unix socket need not be quoted: `http+unix:///run/tandem.sock`.
    Raises ValueError for an invalid address.
    """
    scheme, colon, rest = text.partition(":")
    text = scheme.lower() + colon + rest if rest.startswith("//") else text
    if not text.startswith(_SCHEMES) and ":/" not in text and _NO_SCHEME.fullmatch(text):
        text = f"http://{text}"
    if not text.startswith(_SCHEMES):
        shown = shown_url(text)
        if shown == text:  # not parsed as a password if it has a slash
            shown = text.rpartition("@")[2]
        raise ValueError(
            f"{shown!r} must be HOST:PORT or start with http:// or https://, or with {UNIX_SCHEME} for a Unix socket"
        )
    url = text.rstrip("/").removesuffix("/v1")
    if (path := unix_path(url)) is None:
        _check_host(url)
        return url
    if not path.startswith("/"):
        raise ValueError(f"{text!r} must have the absolute path of a socket, such as {UNIX_SCHEME}/run/tandem.sock")
    return f"{UNIX_SCHEME}{quote(path, safe='')}"


def shown_url(url: str) -> str:
    """Return the URL for messages and logs, with the password replaced by ***."""
    return _PASSWORD.sub(r"\1\2:***", url)


def _check_host(url: str) -> None:
    """Raise ValueError for an invalid host or port."""
    try:
        parts = urlsplit(url)
        is_valid = parts.port != 0 and bool(parts.hostname) and not any(map(str.isspace, url))
    except ValueError:
        is_valid = False
    if not is_valid:
        # The part before an @ may be a password, or half of one.
        shown = url.rpartition("@")[2]
        remedy = "; in a user name or password write / ? # as %2F %3F %23" if "@" in url else ""
        raise ValueError(f"the host or port of {shown!r} is not valid; write http://HOST:PORT{remedy}")


def unix_path(url: str) -> str | None:
    """Return the path of a Unix socket from its URL; None for another URL."""
    return unquote(url.removeprefix(UNIX_SCHEME)) if url.startswith(UNIX_SCHEME) else None


def base_url(url: str) -> str:
    """Return the base URL of request paths."""
    return url if unix_path(url) is None else "http://localhost"
