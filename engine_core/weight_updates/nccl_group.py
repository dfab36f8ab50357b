"""A group over NCCL, called by ctypes in the library that torch has loaded.

torch's own groups agree on their ids in another way than vLLM's trainers, so they cannot join theirs. The communicator
does not block (`ncclConfig_t.blocking = 0`), so that every call can be aborted at a deadline.
"""

import ctypes
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from tandem.engine_core.weight_updates.group import GroupInfo, TransferError, time_left
from tandem.engine_core.weight_updates.hosts import AllowedHosts, address_of_id, check_address
from tandem.engine_core.weight_updates.unique_id import UNIQUE_ID_BYTES, UNIQUE_ID_KEY, read_unique_id

SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0
POLL_SECONDS = 0.0002


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """The first fields of `ncclConfig_t`: of version 2.14, for which the library takes the defaults of later ones."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


MAGIC, VERSION = 0xCAFEBEEF, 21_400


def load_library() -> Any:
    """Load the libnccl that torch uses. Raises TransferError if there is none."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") is not None else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    names = [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders]
    for name in (*names, "libnccl.so.2"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.ncclGetErrorString.restype = ctypes.c_char_p
        return library
    raise TransferError("NCCL was not found; install torch's CUDA build with its libraries")


class NcclGroup:
    """Implement `TransferGroup` on one GPU."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._comm = ctypes.c_void_p()

    @classmethod
    def join(
        cls,
        info: GroupInfo,
        seconds: float,
        device: torch.device,
        allowed: AllowedHosts,
        library: Any = None,
    ) -> "NcclGroup":
        """Join the group of a trainer.

        seconds: to wait for the trainer; allowed: addresses that it may have; library: that of `load_library` by
        default. Raises TransferError.
        """
        deadline = time.monotonic() + seconds
        group = cls(library or load_library(), device)
        unique_id = info.unique_id or _stored_id(info, deadline)
        check_address(address_of_id(unique_id), allowed)
        with torch.cuda.device(device):
            group._initialize(info, unique_id, deadline)
            # vLLM's communicators warm up with this call, which waits for all ranks.
            data = torch.zeros(1, device=device)
            arguments = (ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(1))
            group._run("ncclAllReduce", deadline, *arguments, FLOAT32, SUM)
        return group

    def receive(self, buffer: Tensor, seconds: float) -> None:
        pointer, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel())
        with torch.cuda.device(self._device):
            self._run("ncclBroadcast", time.monotonic() + seconds, pointer, pointer, size, UINT8, 0)

    def close(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            # Unlike ncclCommDestroy, this does not wait for the other ranks.
            self._library.ncclCommAbort(comm)

    def _initialize(self, info: GroupInfo, unique_id: bytes, deadline: float) -> None:
        config = _Config(ctypes.sizeof(_Config), MAGIC, VERSION, 0)
        identity = _Id.from_buffer_copy(unique_id)
        given = ctypes.c_int(info.world_size), identity, ctypes.c_int(info.rank), ctypes.byref(config)
        self._check(self._library.ncclCommInitRankConfig(ctypes.byref(self._comm), *given))
        self._await(lambda: True, deadline)

    def _run(self, name: str, deadline: float, *arguments: Any) -> None:
        """Enqueue a collective operation on the current stream, and wait for its end."""
        if not self._comm:
            raise TransferError("the group is closed; initialize it again")
        stream, done = torch.cuda.current_stream(self._device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._check(getattr(self._library, name)(*arguments, self._comm, ctypes.c_void_p(stream.cuda_stream)))
        self._await(lambda: True, deadline)
        done.record(stream)
        self._await(done.query, deadline)

    def _await(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait until the communicator has no operation in progress and something is done."""
        while True:
            state = ctypes.c_int(SUCCESS)
            self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            self._check(state.value)
            if state.value == SUCCESS and is_done():
                return
            if time.monotonic() > deadline:
                self.close()
                raise TransferError("the trainer did not send within the time that it has (--update-timeout)")
            time.sleep(POLL_SECONDS)

    def _check(self, result: int) -> None:
        """Close the group and raise TransferError for a code of a failure."""
        if result not in (SUCCESS, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result)
            self.close()
            raise TransferError(f"NCCL failed: {text.decode() if text else result}")


def _stored_id(info: GroupInfo, deadline: float) -> bytes:
    """Return the id of a group from the store that the trainer runs."""
    try:
        store = TCPStore(info.address, info.port, info.world_size, is_master=False, timeout=time_left(deadline))
        store.set_timeout(time_left(deadline))
        data = store.get(UNIQUE_ID_KEY)
    except (RuntimeError, OSError) as error:
        raise TransferError(f"could not reach the trainer's store at {info.address}:{info.port}: {error}") from error
    return read_unique_id(data)
