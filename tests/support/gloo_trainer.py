"""Trainer that sends weights to an engine over gloo, as vLLM's do over NCCL."""

from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from tandem.engine_core.weight_updates.gloo_group import PREFIX

SECONDS = 120.0


class GlooTrainer:
    """Rank 0 of a group."""

    def __init__(self, port: int, world_size: int = 2, seconds: float = SECONDS) -> None:
        """Open the store, and wait until the engine has joined."""
        timeout = timedelta(seconds=seconds)
        self.store = TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timeout)
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], timeout
        self.group = ProcessGroupGloo(PrefixStore(PREFIX, self.store), 0, world_size, options)
        self.group.allreduce([torch.zeros(1)]).wait(timeout)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


def packed_broadcast(
    tensors: Iterable[tuple[str, Tensor]],
    broadcast: Callable[[Tensor], None],
    buffer_bytes: int = 2**30,
) -> None:
    """Broadcast tensors in buffers, each of which ends with the tensor that makes it larger than its size.

    buffer_bytes: 0 for a buffer of each tensor.
    """
    parts: list[Tensor] = []
    size = 0
    for _, tensor in tensors:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        size += len(parts[-1])
        if size > buffer_bytes or not buffer_bytes:
            broadcast(torch.cat(parts))
            parts, size = [], 0
    if parts:
        broadcast(torch.cat(parts))
