"""The process group of a trainer and this engine."""

import time
from datetime import timedelta
from typing import Protocol

from msgspec import Struct
from torch import Tensor


def time_left(deadline: float) -> timedelta:
    """Return the time until a deadline, in seconds of `time.monotonic`; at least 1 ms, as torch takes 0 for none."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


class TransferError(Exception):
    """The group could not be joined, or a transfer has failed; the group is closed then."""


class GroupInfo(Struct, frozen=True):
    """What a trainer says about its group. It has rank 0."""

    rank: int
    """Rank of this engine."""
    world_size: int
    address: str = ""
    """Host of the trainer's store; "" with a unique id."""
    port: int = 0
    unique_id: bytes = b""
    """NCCL's id of the group; b"": it is in the store."""


class TransferGroup(Protocol):
    """A group that has been joined."""

    def receive(self, buffer: Tensor, seconds: float) -> None:
        """Receive a buffer that the trainer broadcasts.

        buffer: [bytes] uint8 on the engine's device. Raises TransferError, also after the seconds.
        """

    def close(self) -> None:
        """Leave the group. Idempotent."""
