"""Where Triton kernels are tested: compiled on a CUDA device if there is one, else through Triton's interpreter."""

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


if INTERPRETED:
    _let_loops_end_where_the_device_says()


@pytest.fixture
def device() -> str:
    """The device that the kernels of this process run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"
