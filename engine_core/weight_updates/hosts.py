"""Hosts whose groups an engine may join (--weight-update-hosts)."""

import ipaddress
import socket
import struct

from msgspec import Struct

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.weight_updates.group import TransferError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
OWN = "own"
"""Admits every address of this host. NCCL's id of a trainer on the same host has the address of a network interface."""
_FAMILY_AT, _PORT_AT = 8, 10
"""Offsets in NCCL's id of a group: after 8 bytes of a random number, it is the address of rank 0."""


class AllowedHosts(Struct, frozen=True):
    """Addresses of trainers whose groups may be joined."""

    networks: tuple[Network, ...] = ()
    admits_own: bool = False
    """True for all addresses of this host."""

    def admits(self, address: str) -> bool:
        """Return whether an address is one of these."""
        known = ipaddress.ip_address(address.partition("%")[0])
        if any(known in network for network in self.networks if network.version == known.version):
            return True
        return self.admits_own and is_own(address)


def parse_hosts(text: str) -> AllowedHosts:
    """Return the addresses and networks of a list, in which `own` is this host. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        networks = tuple(ipaddress.ip_network(part, strict=False) for part in parts if part != OWN)
    except ValueError as error:
        example = f"like 10.0.0.0/8, or {OWN} for this host"
        raise ConfigError(f"--weight-update-hosts: {error}; give addresses or networks, {example}") from None
    return AllowedHosts(networks, OWN in parts)


def is_own(address: str) -> bool:
    """Return whether an address is one of this host: packets to it have it as their source too."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address, 1, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # Looks up the route, and sends nothing.
            return bool(probe.getsockname()[0] == target[0])
    except OSError:
        return False


def allowed_address(host: str, port: int, allowed: AllowedHosts) -> str:
    """Return the address of a host, so that it is not looked up again.

    Raises TransferError unless all of its addresses are allowed.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise TransferError(f"master_address {host[:200]!r} was not found: {error}") from None
    for address in found:
        check_address(address, allowed)
    return found[0]


def check_address(address: str, allowed: AllowedHosts) -> None:
    """Raise TransferError for an address that is not allowed."""
    if not allowed.admits(address):
        raise TransferError(f"the trainer's address {address} is not one of --weight-update-hosts; add it there")


def address_of_id(unique_id: bytes) -> str:
    """Return the address of rank 0 in NCCL's id of a group. Raises TransferError for an id without one."""
    (family,) = struct.unpack_from("<H", unique_id, _FAMILY_AT)
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(unique_id[_PORT_AT + 2 : _PORT_AT + 6]))
    if family == socket.AF_INET6:
        return str(ipaddress.IPv6Address(unique_id[_PORT_AT + 6 : _PORT_AT + 22]))
    raise TransferError("the ncclUniqueId has no address of the trainer")
