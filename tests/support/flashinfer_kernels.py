"""The kernels that FlashInfer has on this machine, and a ban on compiling others.

Every head size, dtype, window or not and soft cap or not has its own kernel, and compiling one takes a minute or more.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.startup.attention import FLASHINFER_HEAD_DIMS, HOPPER

BUILD = "TANDEM_TEST_BUILD_KERNELS"
"""Environment variable that lets GPU tests compile FlashInfer's kernels when it is 1."""


def may_build() -> bool:
    return os.environ.get(BUILD) == "1"


@contextmanager
def only_built_kernels() -> Iterator[None]:
    """Let FlashInfer load kernels that came prebuilt or were compiled before, and refuse to compile others.

    Processes that are started meanwhile load prebuilt ones alone.
    """
    from flashinfer.jit.core import JitSpecNvcc

    load_prebuilt = JitSpecNvcc.try_load

    def load_built(spec: Any) -> Any:
        library = load_prebuilt(spec)
        return spec.load() if library is None and spec.jit_library_path.exists() else library

    with patch.object(JitSpecNvcc, "try_load", load_built), patch.dict(os.environ, FLASHINFER_DISABLE_JIT="1"):
        yield


def pinned(count: int) -> Tensor:
    """Allocate int32 host memory from which copies do not synchronise."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def missing_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kinds: Iterable[LayerAttention],
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Return why FlashInfer cannot serve layers of these kinds, in one line; empty if it can.

    kv_dtype: of keys and values, None for that of queries.
    """
    from tandem.engine_core.attention.flashinfer import HeadShape, load_kernel

    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"FlashInfer has no kernels for head_dim {head_dim}"
    for kind in kinds:
        try:
            shape = HeadShape(heads, kv_heads, head_dim, dtype, kv_dtype)
            load_kernel(kind, pinned, torch.device("cuda"), shape)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            hint = "" if may_build() else f"; {BUILD}=1 compiles it"
            what = f"head_dim {head_dim}, {dtype}, keys in {kv_dtype or dtype}"
            what += f", window {kind.window} and soft cap {kind.softcap}"
            return f"FlashInfer has no kernel for {what} ({reason}){hint}"
    return ""


def graph_planner() -> type:
    """Return the class whose objects plan 16-bit prompts in graphs with FlashInfer's kernels on this GPU."""
    from tandem.engine_core.attention.flashinfer import FlashInferGraphPlanner
    from tandem.engine_core.attention.flashinfer_hopper import HopperGraphPlanner

    return HopperGraphPlanner if torch.cuda.get_device_capability()[0] == HOPPER else FlashInferGraphPlanner
