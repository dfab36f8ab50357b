"""Rules for the launch path, enforced while it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine_core.runtime.runtime import TorchRuntime


class PinnedCopies(TorchDispatchMode):
    """Refuses every operation between the device and host memory that is not both pinned and contiguous.

    Sees all of them, `copy_` and `to` as well as the copies inside other calls. A number that travels as a
    zero-dimensional tensor is an argument of a kernel, not a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        hosts = [tensor for tensor in tensors if not tensor.is_cuda and tensor.dim() > 0]
        if hosts and any(tensor.is_cuda for tensor in tensors):
            self.copies += 1
            for host in hosts:
                assert host.is_pinned(), f"{func}: host memory of shape {tuple(host.shape)} is not pinned"
                assert host.is_contiguous(), f"{func}: host memory with strides {host.stride()}"
        return result


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    """Let torch raise at each of its own calls that would wait for the device.

    The first call of a process warns that the mode is a prototype, which must not leave the mode set.
    """
    try:
        with catch_warnings():
            filterwarnings("ignore", message=".*prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def around_launches(runtime: TorchRuntime, guard: Callable[[], Any]) -> Iterator[None]:
    """Every launch and every sampling runs inside a guard."""
    launch, sample = runtime.launch, runtime.sample

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            with guard():
                call(*arguments)

        return run

    with patch.multiple(runtime, launch=guarded(launch), sample=guarded(sample)):
        yield
