"""NCCL's id of a group, as vLLM's trainers publish it: pickled, in a store."""

import io
import pickle
import pickletools
from typing import Any

from tandem.engine_core.weight_updates.group import TransferError

UNIQUE_ID_BYTES = 128
UNIQUE_ID_KEY = "broadcast_from/0/0"
"""Key under which vLLM's `StatelessProcessGroup` has the first object that rank 0 broadcasts."""
MAX_PICKLE_BYTES = 4096
MAX_OPCODES = 64
"""Most instructions of a pickle, and most values that it keeps to use again. A structure takes up to 24."""
_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "EMPTY_DICT", "TUPLE2"),
        *("GLOBAL", "STACK_GLOBAL", "MEMOIZE", "BINPUT", "BINGET", "REDUCE", "STOP"),
    )
)
"""Instructions of a ctypes structure in pickle's protocols 3 to 5. Others allocate any amount, such as LONG_BINPUT."""
_MODULE = ".device_communicators.pynccl_wrapper"


class _UniqueId:
    """Replacement of vLLM's class, which is never imported."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data


def _rebuild(kind: object, state: object) -> _UniqueId:
    """Rebuild a ctypes structure from its pickled state, in place of `_ctypes._unpickle`."""
    if kind is not _UniqueId or not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], bytes):
        raise pickle.UnpicklingError(f"{state!r:.100} is not the state of an ncclUniqueId")
    return _UniqueId(state[1])


class _Unpickler(pickle.Unpickler):
    """Admits vLLM's `ncclUniqueId` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _rebuild
        if module.startswith("vllm.") and module.endswith(_MODULE) and name == "ncclUniqueId":
            return _UniqueId
        raise pickle.UnpicklingError(f"{module[:100]}.{name[:100]} is not an ncclUniqueId")


def _check_opcodes(data: bytes) -> None:
    """Raise UnpicklingError for instructions that the pickle of a structure does not have."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        most = len(data) + 1 if opcode.name == "FRAME" else MAX_OPCODES
        is_bounded = not isinstance(argument, int) or 0 <= argument < most
        if opcode.name not in _OPCODES or count >= MAX_OPCODES or not is_bounded:
            raise pickle.UnpicklingError(f"instruction {count}, {opcode.name}, is none of an ncclUniqueId")


def read_unique_id(data: bytes) -> bytes:
    """Return the 128 bytes of a pickled `ncclUniqueId`. Raises TransferError for any other pickle."""
    if len(data) > MAX_PICKLE_BYTES:
        raise TransferError(f"the trainer's store has {len(data)} bytes as the id of its group, not an ncclUniqueId")
    try:
        _check_opcodes(data)
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # A damaged pickle may raise anything.
        raise TransferError(f"the trainer's store has no ncclUniqueId as the id of its group: {error}") from None
    if not isinstance(found, _UniqueId) or len(found.data) != UNIQUE_ID_BYTES:
        raise TransferError(f"the trainer's store has no ncclUniqueId of {UNIQUE_ID_BYTES} bytes")
    return found.data
