"""Explain connection failures, with a remedy for each."""

import contextlib
import socket
import ssl
from collections.abc import Iterator

import httpx

from tandem.frontend.cli.server_address import base_url, shown_url, unix_path

_PROBE_SECONDS = 3.0
_HOSTNAME_MISMATCH = 62
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""OpenSSL's reasons for a response that is not TLS."""


def is_permanent(error: httpx.HTTPError) -> bool:
    """Return True if a retry would fail in the same way.

    This is the case for an untrusted certificate.
    """
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error))


def connection_failure(url: str, error: httpx.HTTPError) -> str:
    """Explain in one sentence why a request to `url` got no response."""
    url = shown_url(url)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _bad_certificate(url, cause)
    address = httpx.URL(base_url(url))
    if tls := next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None):
        plain = f"give --url {address.copy_with(scheme='http')}"
        if tls.reason in _NOT_TLS:
            return f"the server on {url} does not speak TLS; {plain}"
        return f"the TLS handshake with {url} failed ({tls.reason or tls}); for a server without TLS, {plain}"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"the host {address.host!r} is unknown; check the name in --url {url}"
    if isinstance(error, httpx.ConnectTimeout):
        return f"{url} does not answer; check the address, and that no firewall is in between"
    if isinstance(error, httpx.ConnectError):
        refused = any(isinstance(cause, ConnectionRefusedError) for cause in causes)
        reason = "nothing listens there" if refused else str(error) or type(error).__name__
        return f"no server answers on {url} ({reason}); start one with `tandem serve`, or give another --url"
    if isinstance(error, httpx.TimeoutException):
        return f"the server on {url} sent nothing for too long; raise --timeout"
    if address.scheme == "http" and unix_path(url) is None and _speaks_tls(address):
        return f"the server on {url} speaks TLS; give --url {address.copy_with(scheme='https')}"
    return f"the connection to {url} broke: {error or type(error).__name__}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from _causes(one)
        error = error.__cause__ or error.__context__


def _bad_certificate(url: str, error: ssl.SSLCertVerificationError) -> str:
    reason = error.verify_message.rstrip(".")
    if error.verify_code == _HOSTNAME_MISMATCH:
        return f"the certificate of {url} is of another host ({reason}); give a name of the certificate in --url"
    return (
        f"the certificate of {url} is not trusted ({reason}); give the certificate, or that of its authority, with "
        "--ca-cert FILE, or --insecure to accept any"
    )


def _speaks_tls(address: httpx.URL) -> bool:
    """Try a TLS handshake.

    It distinguishes a server with TLS from one that dropped the connection.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError):
        target = (address.host, address.port or 80)
        with socket.create_connection(target, _PROBE_SECONDS) as plain, context.wrap_socket(plain):
            return True
    return False
