"""Conflicts between flags that ask for the same TCP port."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations

from msgspec import Struct

from tandem.frontend.supervisor.addresses.service_sockets import Addresses
from tandem.frontend.supervisor.addresses.tcp_address import TcpAddress, tcp_addresses
from tandem.frontend.supervisor.model import LaunchError

_ANY = ("0.0.0.0", "::")
"""Wildcard addresses."""


class PortUse(Struct, frozen=True):
    """A port that a flag asks for, with its addresses."""

    flag: str
    port: int
    addresses: Sequence[TcpAddress]


def check_ports(api: Addresses | None, ops_host: str, ops_port: int | None, endpoint: str | None) -> None:
    """Raise LaunchError if `port_clash` finds a conflict."""
    if clash := port_clash(api, ops_host, ops_port, endpoint):
        raise LaunchError(clash)


def port_clash(api: Addresses | None, ops_host: str, ops_port: int | None, endpoint: str | None) -> str:
    """Return an error message if two flags ask for the same port of an address; otherwise "".

    api: the addresses of the frontends, if any. endpoint: the endpoint of an engine of this command. A default ops port
    is not checked, because another one is chosen if it is taken. Raises LaunchError for a host without address.
    """
    uses: list[PortUse] = []
    if api is not None and api.tcp_hosts:
        flag = "--port" if api.port is not None else "--port (by default)"
        uses.append(PortUse(flag, api.tcp_port, tcp_addresses(api.tcp_hosts)))
    if ops_port is not None:
        uses.append(PortUse("--ops-port", ops_port, tcp_addresses([ops_host], "--ops-host")[:1]))
    uses += _endpoint_uses(endpoint) if endpoint is not None else []
    for one, other in combinations(uses, 2):
        if one.port and one.port == other.port and (host := _shared_host(one.addresses, other.addresses)):
            return f"{one.flag} and {other.flag} are both {one.port} on {host}; change one of them"
    return ""


def _endpoint_uses(endpoint: str) -> list[PortUse]:
    """Return the two ports of a TCP endpoint; none for a host that only ZMQ can resolve."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme == "tcp":
        with suppress(LaunchError):
            addresses = tcp_addresses([host.replace("*", "0.0.0.0")], "--endpoint")
            return [
                PortUse("the port of --endpoint", int(port), addresses),
                PortUse("the heartbeat's port of --endpoint (its port + 1)", int(port) + 1, addresses),
            ]
    return []


def _shared_host(some: Sequence[TcpAddress], others: Sequence[TcpAddress]) -> str:
    """Return an address that both use; "" if there is none."""
    for one in some:
        for other in others:
            if one.host == other.host or _includes(one, other) or _includes(other, one):
                return other.host if one.host in _ANY else one.host
    return ""


def _includes(wide: TcpAddress, narrow: TcpAddress) -> bool:
    return wide.is_dual_stack or (wide.host in _ANY and (":" in wide.host) == (":" in narrow.host))
