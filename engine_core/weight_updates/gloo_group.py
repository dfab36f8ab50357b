"""A group over gloo, for engines on a CPU."""

import socket
import time
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from tandem.engine_core.weight_updates.group import GroupInfo, TransferError, time_left

PREFIX = "weights"
"""Prefix of the group's keys in the trainer's store."""


class GlooGroup:
    """Implement `TransferGroup` with torch's gloo, without its global group."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group: ProcessGroupGloo | None = group

    @classmethod
    def join(cls, info: GroupInfo, seconds: float) -> "GlooGroup":
        """Join the group of a trainer, which runs its store.

        seconds: to wait for the trainer, in all stages together. Raises TransferError.
        """
        if not info.address:
            raise TransferError("a group without NCCL, as on a CPU, needs master_address and master_port")
        deadline = time.monotonic() + seconds
        try:
            store = TCPStore(info.address, info.port, info.world_size, is_master=False, timeout=time_left(deadline))
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info))]
            options._timeout = time_left(deadline)
            joined = ProcessGroupGloo(PrefixStore(PREFIX, store), info.rank, info.world_size, options)
            # As NCCL's groups do, so that a trainer warms up both in the same way.
            joined.allreduce([torch.zeros(1)]).wait(time_left(deadline))
        except (RuntimeError, OSError) as error:
            raise TransferError(f"could not join the trainer's group at {info.address}:{info.port}: {error}") from error
        return cls(joined)

    def receive(self, buffer: Tensor, seconds: float) -> None:
        if self._group is None:
            raise TransferError("the group is closed; initialize it again")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=seconds)
        try:
            self._group.broadcast([buffer], options).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            self.close()
            raise TransferError(f"the trainer's broadcast failed: {error}") from error

    def close(self) -> None:
        self._group = None


def _own_address(info: GroupInfo) -> str:
    """Return the address of this host from which the trainer's is reached."""
    family, kind, protocol, _, address = socket.getaddrinfo(info.address, info.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # Sends nothing.
        return str(probe.getsockname()[0])
