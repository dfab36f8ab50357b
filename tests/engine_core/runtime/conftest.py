"""One small model for all tests of the runtime."""

import pytest

from tandem.engine_core.models.llama import LlamaModel
from tests.support.tiny_llama import random_model


@pytest.fixture(scope="session")
def model() -> LlamaModel:
    return random_model()
