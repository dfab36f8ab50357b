"""NCCL's ids of groups in the pickles of vLLM's trainers."""

import ctypes
import os
import pickle
import socket
import struct
import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.weight_updates import hosts as hosts_module
from tandem.engine_core.weight_updates import unique_id
from tandem.engine_core.weight_updates.group import TransferError
from tandem.engine_core.weight_updates.hosts import address_of_id, allowed_address, check_address, is_own, parse_hosts
from tandem.engine_core.weight_updates.unique_id import read_unique_id
from tandem.protocol.engine_options import EngineOptions
from tests.support.nccl_trainer import pickled_id

DATA = bytes(range(100, 228))


def structure(module: str, name: str, size: int = 128) -> Any:
    fields = [("internal", ctypes.c_byte * size)]
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__module__": module, "__qualname__": name})


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pickle a ctypes structure of some module and name, as vLLM's process groups do."""

    def make(module: str, name: str = "ncclUniqueId", size: int = 128) -> bytes:
        kind = structure(module, name, size)
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            parent = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[module], name, kind)
        return pickle.dumps(kind.from_buffer_copy((DATA * 2)[:size]))

    return make


@pytest.mark.parametrize(
    "module",
    [
        "vllm.distributed.device_communicators.pynccl_wrapper",
        "vllm.backends.distributed.device_communicators.pynccl_wrapper",
    ],
)
def test_the_id_of_vllm_is_read(pickled: Any, module: str) -> None:
    assert read_unique_id(pickled(module)) == DATA


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_protocols_of_pickle_are_read(pickled: Any, protocol: int) -> None:
    module = "vllm.distributed.device_communicators.pynccl_wrapper"
    kind = type(pickle.loads(pickled(module)))
    for dumps in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        assert read_unique_id(dumps(kind.from_buffer_copy(DATA), protocol)) == DATA


@pytest.mark.parametrize(
    "data",
    [
        b"Nr" + struct.pack("<I", 2**20) + b".",
        b"Np1048576\n.",
        b"Nq\x40.",
        b"}" + b"q\x3f" * 64 + b".",
        b"\x80\x04}" + b"\x94" * 64 + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**20) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**20) + b".",
        b"B" + struct.pack("<I", 2**20) + b".",
        b"K\x01K\x02\x86.",
    ],
)
def test_instructions_that_no_structure_has_are_not_executed(data: bytes) -> None:
    with patch.object(unique_id, "_Unpickler") as executed, pytest.raises(TransferError):
        read_unique_id(data)
    assert not executed.called


def test_the_id_of_our_own_trainer_is_that_of_vllm() -> None:
    before = set(sys.modules)
    assert read_unique_id(pickled_id(DATA)) == DATA
    assert set(sys.modules) == before


class Calls:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_any_other_pickle_is_refused(pickled: Any) -> None:
    module = "vllm.distributed.device_communicators.pynccl_wrapper"
    refused = [
        b"",
        b"\x80",
        pickle.dumps(DATA),
        pickle.dumps((1, "x")),
        pickle.dumps(Calls()),
        pickle.dumps(ctypes.c_int),
        pickle.dumps(os.path.join),
        pickled("other.device_communicators.pynccl_wrapper"),
        pickled(module, "ncclComm_t"),
        pickled(module, size=64),
        pickled(module) + b"x" * 5000,
        b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n.",
        b"c_ctypes\n_unpickle\n.",
        b"c_ctypes\n_unpickle\n(cbuiltins\nint\n(}S'x'\nttR.",
    ]
    for data in refused:
        with pytest.raises(TransferError):
            read_unique_id(data)


@pytest.mark.parametrize(
    ("family", "rest", "address"),
    [
        (socket.AF_INET, struct.pack("!H4s", 4000, bytes((10, 1, 2, 3))), "10.1.2.3"),
        (socket.AF_INET6, struct.pack("!HI16sI", 4000, 0, bytes(15) + b"\1", 0), "::1"),
    ],
)
def test_an_id_names_the_address_of_the_trainer(family: int, rest: bytes, address: str) -> None:
    unique_id = (bytes(8) + struct.pack("<H", family) + rest).ljust(128, b"\0")
    assert address_of_id(unique_id) == address


def test_an_id_without_an_address_is_refused() -> None:
    with pytest.raises(TransferError):
        address_of_id(bytes(128))


@pytest.mark.parametrize(
    ("hosts", "address", "allowed"),
    [
        ("127.0.0.0/8,::1", "127.0.0.1", True),
        ("127.0.0.0/8,::1", "127.9.9.9", True),
        ("127.0.0.0/8,::1", "::1", True),
        ("127.0.0.0/8,::1", "10.0.0.1", False),
        ("127.0.0.0/8,::1", "::2", False),
        ("10.0.0.0/8", "10.200.0.1", True),
        ("", "127.0.0.1", False),
    ],
)
def test_only_listed_addresses_are_allowed(hosts: str, address: str, allowed: bool) -> None:
    if allowed:
        check_address(address, parse_hosts(hosts))
        assert allowed_address(address, 1, parse_hosts(hosts)) == address
    else:
        with pytest.raises(TransferError, match="--weight-update-hosts"):
            check_address(address, parse_hosts(hosts))


def test_the_default_admits_all_addresses_of_this_host() -> None:
    hosts = parse_hosts(EngineOptions(model="m").weight_update_hosts)
    assert hosts.admits_own and hosts.admits("127.9.9.9") and hosts.admits("::1")
    for address in ("203.0.113.77", "0.0.0.0", "::", "255.255.255.255", "224.0.0.1", "2001:db8::77"):
        assert not hosts.admits(address), address


@pytest.mark.parametrize(
    ("hosts", "address", "allowed"),
    [
        ("own", "127.0.0.1", True),
        ("own", "203.0.113.77", False),
        ("10.0.0.0/8, own", "127.0.0.1", True),
        ("10.0.0.0/8, own", "10.1.1.1", True),
        ("10.0.0.0/8", "127.0.0.1", False),
    ],
)
def test_own_addresses_are_admitted_by_a_word(hosts: str, address: str, allowed: bool) -> None:
    assert parse_hosts(hosts).admits(address) is allowed


@pytest.mark.parametrize(("source", "expected"), [("192.0.2.2", True), ("192.0.2.3", False)])
def test_an_address_is_own_if_packets_to_it_come_from_it(source: str, expected: bool) -> None:
    with patch.object(hosts_module.socket, "socket") as made:
        probe = made.return_value.__enter__.return_value
        probe.getsockname.return_value = (source, 40000)
        assert is_own("192.0.2.2") is expected
        probe.connect.side_effect = OSError("no route")
        assert not is_own("192.0.2.2")


def test_hosts_that_are_no_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="--weight-update-hosts"):
        parse_hosts("localhost")
