"""Hosts whose groups an engine may join (--weight-update-hosts)."""

import ipaddress
import socket
import struct
from collections.abc import Sequence

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.weight_updates.group import TransferError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_FAMILY_AT, _PORT_AT = 8, 10
"""Offsets in NCCL's id of a group: after 8 bytes of a random number, it is the address of rank 0."""


def parse_hosts(text: str) -> tuple[Network, ...]:
    """Return the addresses and networks of a list. Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"--weight-update-hosts: {error}; give addresses or networks, like 10.0.0.0/8") from None


def allowed_address(host: str, port: int, allowed: Sequence[Network]) -> str:
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


def check_address(address: str, allowed: Sequence[Network]) -> None:
    """Raise TransferError for an address that is not allowed."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if not any(known in network for network in allowed if network.version == known.version):
        raise TransferError(f"the trainer's address {address} is not one of --weight-update-hosts; add it there")


def address_of_id(unique_id: bytes) -> str:
    """Return the address of rank 0 in NCCL's id of a group. Raises TransferError for an id without one."""
    (family,) = struct.unpack_from("<H", unique_id, _FAMILY_AT)
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(unique_id[_PORT_AT + 2 : _PORT_AT + 6]))
    if family == socket.AF_INET6:
        return str(ipaddress.IPv6Address(unique_id[_PORT_AT + 6 : _PORT_AT + 22]))
    raise TransferError("the ncclUniqueId has no address of the trainer")
