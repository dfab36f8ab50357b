"""Who may change the weights of an engine."""

import ipaddress

from fastapi import Request

from tandem.frontend.access.allowed_hosts import UNIX
from tandem.frontend.api.request_scope import PEER_KEY
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError


def check_allowed(service: Service, request: Request) -> None:
    """Refuse a request that would change weights where that is not allowed.

    Raises ApiError 404 unless the engine lets its weights change, 403 without API keys from another host, 503 before an
    engine is ready.
    """
    if not service.ready().model.weight_transfer:
        message = f"{request.method} {request.url.path}: not found; start the server with --enable-weight-updates"
        raise ApiError(404, message, None, "unknown_url")
    if not service.keys.is_required and not is_local(request):
        message = "without API keys (--api-keys) the weights can be changed from the same host only"
        raise ApiError(403, message, None, "insufficient_permissions")


def is_local(request: Request) -> bool:
    """Return whether a request comes from this host: by a loopback address, or a Unix socket.

    So must all addresses in `X-Forwarded-For`, whether the proxy is trusted or not: a client can write any of them, but
    a proxy adds its own.
    """
    peer = request.scope.get(PEER_KEY, request.client)
    forwarded = [text.strip() for value in request.headers.getlist("x-forwarded-for") for text in value.split(",")]
    return (peer is None or peer[0] in ("", UNIX) or _is_loopback(peer[0])) and all(map(_is_loopback, forwarded))


def _is_loopback(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
