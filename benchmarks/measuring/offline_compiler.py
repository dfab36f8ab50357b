"""Compile Triton kernels for a GPU that is not present.

Compiled code goes to Triton's cache, where a process with the GPU finds it: cache keys depend on the architecture, the
sources and the arguments, not on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class CompileOnlyDriver:
    """Triton driver for one architecture that compiles but cannot launch."""

    def __init__(self, architecture: int) -> None:
        """Initialize for an architecture, such as 80 for sm_80."""
        self.architecture = architecture

    def get_current_device(self) -> int:
        """Return the architecture as the device index."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the compilation target."""
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def compiling_only(architecture: int) -> Iterator[list[Any]]:
    """Compile each kernel instead of launching it, with arguments on any device.

    Yields the list of compiled kernels in launch order. Kernels must not be interpreted.
    """
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_it(kernel: Any, *arguments: Any, **options: Any) -> None:
        compiled.append(run(kernel, *arguments, **{**options, "warmup": True}))

    before = driver._active
    driver.set_active(CompileOnlyDriver(architecture))
    try:
        with patch.object(JITFunction, "run", compile_it):
            yield compiled
    finally:
        driver._active = before
