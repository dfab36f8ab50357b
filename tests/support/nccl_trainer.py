"""Trainer that sends weights to an engine through NCCL, and publishes its group as vLLM's trainers do."""

import ctypes
import pickle
import sys
import types
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from tandem.engine_core.weight_updates.group import GroupInfo, TransferError
from tandem.engine_core.weight_updates.hosts import parse_hosts
from tandem.engine_core.weight_updates.nccl_group import NcclGroup, load_library
from tandem.engine_core.weight_updates.unique_id import UNIQUE_ID_BYTES, UNIQUE_ID_KEY

SECONDS = 120.0
ANY_HOST = "0.0.0.0/0,::/0"
"""NCCL's id has the address of the interface that it chooses, which is not always loopback."""
MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


def pickled_id(data: bytes) -> bytes:
    """Return the pickle of vLLM's `ncclUniqueId`, a ctypes structure, with this content.

    data: the 128 bytes of the id. Modules named like vLLM's are registered meanwhile, as pickle looks the class up.
    """
    parts = MODULE.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    fields = {"_fields_": [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)], "__module__": MODULE}
    try:
        sys.modules.update({name: types.ModuleType(name) for name in names})
        kind: Any = type("ncclUniqueId", (ctypes.Structure,), fields)
        sys.modules[MODULE].__dict__["ncclUniqueId"] = kind
        return pickle.dumps(kind.from_buffer_copy(data))
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


class NcclTrainer:
    """Rank 0 of a group, on a GPU of its own."""

    def __init__(self, port: int, device: torch.device, world_size: int = 2, seconds: float = SECONDS) -> None:
        """Open the store with the group's id, and wait until the engine has joined."""
        library = load_library()
        unique_id = (ctypes.c_byte * UNIQUE_ID_BYTES)()
        if result := library.ncclGetUniqueId(ctypes.byref(unique_id)):
            raise TransferError(f"ncclGetUniqueId failed: {result}")
        timeout = timedelta(seconds=seconds)
        self.store = TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        self.store.set(UNIQUE_ID_KEY, pickled_id(bytes(unique_id)))
        info = GroupInfo(0, world_size, unique_id=bytes(unique_id))
        self._group = NcclGroup.join(info, seconds, device, parse_hosts(ANY_HOST), library)
        self._seconds = seconds

    def broadcast(self, tensor: Tensor) -> None:
        # The engine's call is a broadcast from rank 0, which sends what its buffer has.
        self._group.receive(tensor, self._seconds)
