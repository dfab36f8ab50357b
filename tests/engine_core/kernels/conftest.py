"""Device of the Triton kernel tests: a CUDA device if there is one, else Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available() and find_spec("triton") is not None:
    from tests.support.interpreter import adapt_interpreter

    adapt_interpreter()


@pytest.fixture
def device() -> str:
    """The device that the kernels of this process run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"
