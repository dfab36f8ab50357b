"""Compilation of Triton kernels for a GPU that need not be there.

What is compiled lands in Triton's cache, where a process with the GPU finds it: the name of an entry depends on the
architecture, the sources and the arguments, not on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class CompileOnlyDriver:
    """A driver of Triton for one architecture, which compiles and cannot launch."""

    def __init__(self, architecture: int) -> None:
        """Stand in for a GPU of an architecture, 80 for sm_80."""
        self.architecture = architecture

    def get_current_device(self) -> int:
        """Return a number that no other architecture has."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what Triton compiles for."""
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def compiling_only(architecture: int) -> Iterator[list[Any]]:
    """Compile each kernel in place of its launch, with arguments on any device.

    Yields the list of the compiled kernels, in the order of the launches. Kernels must not be interpreted.
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
