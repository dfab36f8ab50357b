"""Where Triton kernels are tested: compiled on a CUDA device if there is one, else through Triton's interpreter."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = not torch.cuda.is_available() and find_spec("triton") is not None


def _let_loops_end_where_the_device_says() -> None:
    """NumPy 2.4 no longer turns an array of one element into a number, as Triton 3.6 does for a loop's bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def _patch_the_language_once_a_launch() -> None:
    """Skip the patches of `triton.language` that stand already.

    The interpreter puts its functions in place before a launch, and again at every call of a device function, which
    takes many times as long as the call. A launch takes them out of `tl` at its end, but not out of `tl.core`.
    """
    from triton.runtime import interpreter

    tl, patch = interpreter.tl, interpreter._patch_lang

    @cache
    def modules_of(function: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def patch_what_is_left(function: Any) -> Any:
        members = [tl.tensor.__add__, *(module.load for module in modules_of(function))]
        if any(map(tl.core.is_builtin, members)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_left


if INTERPRETED:
    _let_loops_end_where_the_device_says()
    _patch_the_language_once_a_launch()


@pytest.fixture
def device() -> str:
    """The device that the kernels of this process run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"
