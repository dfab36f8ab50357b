"""Arrival counters of programs that share work, used to detect the last one."""

import torch
from torch import Tensor

COUNTERS = 1 << 16
"""Maximum number of counters used by one launch."""

_counters: dict[tuple[str, torch.device], Tensor] = {}


def split_counters(kernel: str, device: torch.device) -> Tensor:
    """Return a kernel's counters on a device, [COUNTERS] int32.

    The counters are zero between launches. They live as long as the process, because captured graphs hold their
    address. A kernel's launches on one device must be ordered. Raises RuntimeError if the first call for a kernel and
    device is under graph capture.
    """
    if (kernel, device) not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{kernel} has to run once before it is captured in a graph")
        _counters[kernel, device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[kernel, device]
