"""Counters by which the last of several programs that share a piece of work knows that it is the last."""

import torch
from torch import Tensor

COUNTERS = 1 << 16
"""Pieces of work of one launch at most."""

_counters: dict[tuple[str, torch.device], Tensor] = {}


def arrivals(kernel: str, device: torch.device) -> Tensor:
    """[COUNTERS] int32 of one kernel, zero between its launches. Kept for good: captured graphs point at them.

    A kernel's launches on one device must be ordered. RuntimeError if its first call is under graph capture.
    """
    if (kernel, device) not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{kernel} has to run once before it is captured")
        _counters[kernel, device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[kernel, device]
