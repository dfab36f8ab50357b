"""One small model for all tests of the runtime."""

import pytest

from tandem.engine_core.models.decoder import Decoder
from tests.support.tiny_llama import random_model


@pytest.fixture(scope="session")
def model() -> Decoder:
    return random_model()
