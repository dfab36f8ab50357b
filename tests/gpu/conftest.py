"""Settings of the GPU tests."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support.flashinfer_kernels import may_build, only_built_kernels


@pytest.fixture(autouse=True, scope="session")
def kernels_of_flashinfer() -> Iterator[None]:
    """Keep FlashInfer from compiling: kinds without a prebuilt kernel run on Triton, or are skipped."""
    if may_build() or find_spec("flashinfer") is None or not torch.cuda.is_available():
        yield
        return
    with only_built_kernels():
        yield
